"""Qwen-Image-Edit, -2509 and -2511: the text encoder sees the references, whose latents are further
tokens.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE
from PIL import Image
from typing_extensions import override

from paco_grpo.policies.base import PolicySettings
from paco_grpo.policies.qwen_image import QwenImagePolicy
from paco_grpo.policies.reference_image import Reference, ReferenceImagePolicy
from paco_grpo.types import Item

_ROUNDED_TO = 32  # pixels, by the pipeline's calculate_dimensions


def mark_image_tokens(
    encoder: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook: image tokens get rows and columns as positions (M-RoPE).

    Qwen2.5-VL was trained with them. transformers computes them from ``mm_token_type_ids``, which
    diffusers 0.42 does not pass on.
    """
    ids = kwargs["input_ids"]
    return args, {"mm_token_type_ids": (ids == encoder.config.image_token_id).int(), **kwargs}


# The same for a model card, where ``pipe`` is the pipeline.
_MARK_IMAGE_TOKENS = """\
# Image tokens get the positions that they had in training (diffusers 0.42 leaves them out).
def mark_image_tokens(encoder, args, kwargs):
    ids = kwargs["input_ids"]
    return args, {"mm_token_type_ids": (ids == encoder.config.image_token_id).int(), **kwargs}

pipe.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)
"""


class QwenImageEditPolicy(ReferenceImagePolicy, QwenImagePolicy):
    """Qwen-Image-Edit and everything saved as a ``QwenImageEditPipeline``."""

    pipeline_class = QwenImageEditPipeline
    family = "Qwen-Image-Edit"
    cuts_text = False  # the pipeline encodes all of an instruction
    card_setup = _MARK_IMAGE_TOKENS

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        self.size_step = _ROUNDED_TO
        pipeline.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)

    @override
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """As the pipeline sizes reference images: to the nearest multiples of 32 pixels."""
        width, height, _ = calculate_dimensions(area, aspect)
        return max(height, _ROUNDED_TO), max(width, _ROUNDED_TO)

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        """With the references as they are: the pipeline resizes them."""
        images = [reference.original for reference in self._read(item)]
        arguments = super().pipeline_arguments(item)
        return arguments | {"image": images if self.several_images else images[0]}

    @contextmanager
    @override
    def whole_pipeline(self, item: Item) -> Iterator[DiffusionPipeline]:
        """It resizes references as this policy does; alone, it would encode them at a megapixel."""
        module = sys.modules[self.pipeline_class.__module__]
        calculate = module.calculate_dimensions
        sizes = {}  # width and height by aspect
        for image in item.images:
            height, width = self.reference_size(image, item)
            sizes[image.width / image.height] = (width, height)

        def calculate_dimensions(area: float, aspect: float) -> tuple:
            unchanged = calculate(area, aspect)
            if area != 1024 * 1024:  # what the text encoder sees
                return unchanged
            return *sizes[aspect], *unchanged[2:]

        module.calculate_dimensions = calculate_dimensions
        try:
            with super().whole_pipeline(item) as pipeline:
                yield pipeline
        finally:
            module.calculate_dimensions = calculate

    @override
    def _seen(self, references: Sequence[Reference]) -> Sequence[Image.Image]:
        return [reference.image for reference in references]  # as the VAE

    @override
    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.unsqueeze(2)  # a video of one frame


class QwenImageEditPlusPolicy(QwenImageEditPolicy):
    """Qwen-Image-Edit-2509, -2511 and everything saved as a ``QwenImageEditPlusPipeline``.

    The text encoder sees each image at the pipeline's own area of 384² pixels, whatever size is
    generated.
    """

    pipeline_class = QwenImageEditPlusPipeline
    family = "Qwen-Image-Edit-Plus"
    several_images = True
    shape_from = -1

    @override
    def _seen(self, references: Sequence[Reference]) -> Sequence[Image.Image]:
        seen = []
        for reference in references:
            image = reference.original
            size = self.fit_area(CONDITION_IMAGE_SIZE, image.width / image.height)
            seen.append(self.pipeline.image_processor.resize(image, *size))
        return seen
