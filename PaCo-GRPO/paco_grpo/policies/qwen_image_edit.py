"""Qwen-Image-Edit: the vision-language text encoder sees the reference images, and their latents are further tokens."""

import inspect
from collections.abc import Sequence

import torch
from diffusers import DiffusionPipeline, QwenImageEditPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from PIL import Image

from paco_grpo.policies.qwen_image import QwenImagePolicy
from paco_grpo.policies.reference_image import Reference, ReferenceImagePolicy

_ROUNDED_TO = 32  # pixels, by the pipeline's calculate_dimensions


def mark_image_tokens(encoder, args, kwargs):
    """Forward pre-hook: image tokens get their rows and columns as positions (M-RoPE), as Qwen2.5-VL was trained.

    transformers 5 computes them from ``mm_token_type_ids``, which diffusers 0.42 does not pass on.
    """
    ids = kwargs["input_ids"]
    return args, {"mm_token_type_ids": (ids == encoder.config.image_token_id).int(), **kwargs}


class QwenImageEditPolicy(ReferenceImagePolicy, QwenImagePolicy):
    """Qwen-Image-Edit and everything saved as a ``QwenImageEditPipeline``."""

    pipeline_class = QwenImageEditPipeline
    family = "Qwen-Image-Edit"
    text_sees_image = True
    cuts_text = False  # the pipeline encodes all of an instruction

    def __init__(
        self, pipeline: DiffusionPipeline, *, image_positions: str = "mrope", **options
    ) -> None:
        super().__init__(pipeline, **options)
        self.size_step = _ROUNDED_TO
        if image_positions == "mrope":
            pipeline.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)
            self.pipeline_setup = (
                f"{inspect.getsource(mark_image_tokens)}\n\n"
                "pipe.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)"
            )

    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """As the pipeline sizes reference images: both sides to the nearest multiple of 32 pixels (at least one)."""
        width, height, _ = calculate_dimensions(area, aspect)
        return max(height, _ROUNDED_TO), max(width, _ROUNDED_TO)

    def _seen(self, references: Sequence[Reference]) -> Sequence[Image.Image]:
        return [reference.image for reference in references]  # as the VAE

    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.unsqueeze(2)  # a video of one frame
