"""True classifier-free guidance: a forward with the prompt, and one with a negative prompt."""

import logging
from typing import ClassVar

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from paco_grpo.policies.base import PolicySettings
from paco_grpo.policies.diffusers_policy import DiffusersPolicy

logger = logging.getLogger(__name__)


class TrueCfgPolicy(DiffusersPolicy):
    """A policy that decides when it is loaded whether it ``uses_true_cfg``."""

    has_true_cfg = True
    # Where no negative prompt is given; None: then there is no guidance.
    default_negative: ClassVar[str | None] = None
    least_scale: ClassVar[float] = 1.0  # the pipeline guides if the scale is greater than this

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        is_given = self.negative_prompt is not None
        if not is_given:
            self.negative_prompt = self.default_negative
        is_scaled = self.guidance_scale > self.least_scale
        self.uses_true_cfg = is_scaled and self.negative_prompt is not None
        if not self.uses_true_cfg and (is_given or is_scaled):
            logger.warning(
                "no true CFG: config.sample.guidance_scale is %g and "
                "config.sample.negative_prompt is %r, but it needs a "
                "scale above %g and a negative prompt (a space is enough)",
                self.guidance_scale,
                self.negative_prompt,
                self.least_scale,
            )

    @override
    def guidance_arguments(self) -> dict[str, object]:
        return {"guidance_scale": self.guidance_scale, "negative_prompt": self.negative_prompt}


class ScaleFromZero(TrueCfgPolicy):
    """A policy whose pipeline counts the scale from 0: c + scale·(c − u), if it is positive.

    u is for an empty prompt unless ``negative_prompt`` says otherwise. This is the others' guidance
    with scale + 1; a distilled model is meant for scale 0.
    """

    default_negative = ""
    least_scale = 0.0

    @override
    def _combined(self, conditional: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        return conditional + self.guidance_scale * (conditional - negative)
