"""LongCat-Image and LongCat-Image-Edit: FLUX.1's blocks, Qwen2.5-VL texts, true CFG."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from diffusers import DiffusionPipeline, LongCatImageEditPipeline, LongCatImagePipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image
from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from paco_grpo.policies.base import PolicySettings
from paco_grpo.policies.diffusers_policy import ForwardInputs, lora_targets_with
from paco_grpo.policies.qwen_image_edit import QwenImageEditPolicy, mark_image_tokens
from paco_grpo.policies.reference_image import Reference, ReferenceImagePolicy
from paco_grpo.policies.true_cfg import TrueCfgPolicy
from paco_grpo.types import Item

_APOSTROPHE = re.compile(r"(?<=[a-zA-Z])'(?=[a-zA-Z])")
_split_quotation = pipeline_longcat_image.split_quotation


def split_quotation(prompt: str) -> list[tuple[str, bool]]:
    """The parts of ``prompt``, and whether each is quoted.

    The function in diffusers swaps words with an apostrophe (``fox's``, ``cat's``), differently in
    each process.
    """
    parts = _split_quotation(_APOSTROPHE.sub("\0", prompt))
    return [(part.replace("\0", "'"), is_quoted) for part, is_quoted in parts]


class LongCatPolicy(TrueCfgPolicy):
    """What both pipelines share.

    True CFG is on if ``guidance_scale`` > 1, against an empty prompt unless ``negative_prompt``
    says otherwise. Padding is attended to, so ``max_sequence_length`` changes images.
    """

    default_negative = ""
    lora_targets = lora_targets_with("ff", "ff_context")

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        pipeline.tokenizer_max_length = self.max_sequence_length
        self.card_setup += f"pipe.tokenizer_max_length = {self.max_sequence_length}\n"

    @classmethod
    @override
    def count_tokens(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> int:
        """Each character between quotation marks is a text of its own."""
        pieces = []
        for part, is_quoted in split_quotation(prompt):
            pieces += part if is_quoted else [part]
        return sum(len(tokenizer(piece, add_special_tokens=False).input_ids) for piece in pieces)

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Qwen2.5-VL."""
        return (self.pipeline.text_encoder,)

    @contextmanager
    @override
    def whole_pipeline(self, item: Item) -> Iterator[DiffusionPipeline]:
        """With our ``split_quotation``."""
        with self._own_quotations(), super().whole_pipeline(item) as pipeline:
            yield pipeline

    def _own_quotations(self) -> AbstractContextManager[object]:
        module = sys.modules[self.pipeline_class.__module__]
        return mock.patch.object(module, "split_quotation", split_quotation)

    @override
    def _encode_text(self, text: str, length: int, *images: Image.Image) -> tuple[torch.Tensor]:
        with (
            self._own_quotations(),
            mock.patch.object(self.pipeline, "tokenizer_max_length", length),
        ):
            embeds, _ = self.pipeline.encode_prompt([text], *images)
        return (embeds[0],)

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, grids = self._tokens(inputs)
        embeds, mask, _ = inputs.text
        if mask is not None:  # other shapes have other numbers of vision tokens
            (length,) = set(mask.sum(dim=1).tolist())
            embeds = embeds[:, :length]
        text_ids, image_ids = self._ids_for(embeds.shape[1], *grids)
        return self.transformer(
            hidden_states=tokens.to(self.dtype),
            timestep=inputs.sigma,  # the transformer multiplies by 1000
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]

    def _ids_for(self, length: int, *grids: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (image, row, column) of text (L, 3) and all images (M, 3)."""
        key = (length, *grids)
        if key not in self._ids:
            text = prepare_pos_ids(0, "text", num_token=length)
            images = []
            for i, (rows, columns) in enumerate(grids, start=1):
                start = (length, length)  # behind the text, also for a reference
                images.append(prepare_pos_ids(i, "image", start, height=rows, width=columns))
            self._ids[key] = text.to(self.device), torch.cat(images).to(self.device)
        return self._ids[key]


class LongCatImagePolicy(LongCatPolicy):
    """LongCat-Image and everything saved as a ``LongCatImagePipeline``.

    A guided velocity that is longer than the conditional one is shortened to it at every token, as
    in the pipeline. Prompts are not rewritten.
    """

    pipeline_class = LongCatImagePipeline
    family = "LongCat-Image"

    @override
    def guidance_arguments(self) -> dict[str, object]:
        return super().guidance_arguments() | {"enable_prompt_rewrite": False}

    @override
    def _combined(self, conditional: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        combined = super()._combined(conditional, negative)
        norm = conditional.norm(dim=-1, keepdim=True)
        combined_norm = combined.norm(dim=-1, keepdim=True)
        return combined * (norm / (combined_norm + 1e-8)).clamp(max=1.0)


class LongCatImageEditPolicy(ReferenceImagePolicy, LongCatPolicy):
    """LongCat-Image-Edit and everything saved as a ``LongCatImageEditPipeline``.

    The reference is resized to the size of the generated image, whatever its shape, and the text
    encoder sees it at half of that.
    """

    pipeline_class = LongCatImageEditPipeline
    family = "LongCat-Image-Edit"
    card_setup = QwenImageEditPolicy.card_setup

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        pipeline.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)

    @override
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """A reference has the size of its item; for an item without one, the nearest size."""
        return self._nearest_size(area**0.5, aspect)

    @override
    def reference_size(self, image: Image.Image, item: Item) -> tuple[int, int]:
        if item.height is None or item.width is None:
            return super().reference_size(image, item)
        return item.height, item.width

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        """With one image, from which the pipeline takes its size."""
        arguments = super().pipeline_arguments(item)
        return arguments | {"image": arguments["image"][0]}

    @contextmanager
    @override
    def whole_pipeline(self, item: Item) -> Iterator[DiffusionPipeline]:
        """It generates the item's size, not a megapixel."""
        module = sys.modules[self.pipeline_class.__module__]
        size = item.width, item.height
        with (
            mock.patch.object(module, "calculate_dimensions", lambda area, ratio: size),
            super().whole_pipeline(item) as pipeline,
        ):
            yield pipeline

    @override
    def _seen(self, references: Sequence[Reference]) -> Sequence[Image.Image]:
        resize = self.pipeline.image_processor.resize
        seen = []
        for reference in references:
            image = reference.image
            seen.append(resize(image, image.height // 2, image.width // 2))
        return seen

    @override
    def _encode_text(self, text: str, length: int, *images: Image.Image) -> tuple[torch.Tensor]:
        # The pipeline fails at a longer text.
        while self.count_tokens(self.pipeline.tokenizer, text) > length:
            text = text[:-1]
        return super()._encode_text(text, length, *images)
