"""True classifier-free guidance: a forward with the prompt, and one with a negative prompt."""

import logging
from typing import Any, ClassVar

from diffusers import DiffusionPipeline

from paco_grpo.policies.diffusers_policy import DiffusersPolicy

logger = logging.getLogger(__name__)


class TrueCfgPolicy(DiffusersPolicy):
    """A policy that decides when it is loaded whether it is ``guided``."""

    has_true_cfg = True
    default_negative: ClassVar[str | None] = (
        None  # where no negative prompt is given; None = then there is no guidance
    )
    least_scale: ClassVar[float] = 1.0  # the pipeline guides if the scale is greater than this

    def __init__(self, pipeline: DiffusionPipeline, **options) -> None:
        super().__init__(pipeline, **options)
        given, scaled = self.negative_prompt is not None, self.guidance_scale > self.least_scale
        self.guided = self.would_guide(self.guidance_scale, self.negative_prompt)
        if (given and not scaled) or (scaled and not given and self.default_negative is None):
            logger.warning(
                "no true CFG: config.sample.guidance_scale is %g and config.sample.negative_prompt is %r, but it needs a "
                "scale above %g and a negative prompt (a space is enough)",
                self.guidance_scale, self.negative_prompt, self.least_scale,
            )  # fmt: skip
        if not given:
            self.negative_prompt = self.default_negative

    def guidance_arguments(self) -> dict[str, Any]:
        """As in ``DiffusersPolicy``."""
        return {"guidance_scale": self.guidance_scale, "negative_prompt": self.negative_prompt}

    @classmethod
    def would_guide(cls, guidance_scale: float, negative_prompt: str | None) -> bool:
        """As in ``Policy``."""
        return guidance_scale > cls.least_scale and (
            negative_prompt is not None or cls.default_negative is not None
        )
