"""Qwen-Image text-to-image, and what its editors share: Qwen2.5-VL as text encoder, a video's VAE, true CFG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DiffusionPipeline, QwenImagePipeline
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from paco_grpo.policies.base import ForwardInputs, PolicyLoadError
from paco_grpo.policies.diffusers_policy import EncoderImages, lora_targets_with
from paco_grpo.policies.true_cfg import TrueCfgPolicy
from paco_grpo.types import Conditioning, Item

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase


@dataclass
class QwenConditioning(Conditioning):
    """Features of the prompt and, for true CFG, of the negative prompt.

    Texts are padded to the longest of their call to ``encode``, with a mask if they differ. Selecting rows changes neither,
    so rollout and training compute the same numbers.
    """

    prompt_embeds: torch.Tensor  # (B, L, D) in the policy's dtype
    prompt_mask: torch.Tensor | None  # (B, L) bool, True = token; None = all have L tokens
    negative_embeds: torch.Tensor | None = None  # (B, L', D)
    negative_mask: torch.Tensor | None = None  # (B, L') bool


class QwenImagePolicy(TrueCfgPolicy):
    """Qwen-Image, Qwen-Image-2512 and everything saved as a ``QwenImagePipeline``.

    True CFG is on if ``negative_prompt`` is set and ``guidance_scale`` > 1. The guided velocity is rescaled to the norm of
    the conditional one at every token, as in the pipeline.
    """

    pipeline_class = QwenImagePipeline
    family = "Qwen-Image"
    masks_text = True
    text_limit = 1024
    lora_targets = lora_targets_with("img_mlp", "txt_mlp")

    def __init__(self, pipeline: DiffusionPipeline, **options) -> None:
        if pipeline.transformer.config.guidance_embeds:
            raise PolicyLoadError(
                "the transformer is guidance-distilled (guidance_embeds), which diffusers' QwenImageTransformer2DModel "
                "cannot compute: use Qwen/Qwen-Image-2512 or Qwen/Qwen-Image-Edit-2511"
            )
        super().__init__(pipeline, **options)

    @classmethod
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        """2x2 latents are a token, and each temporal level of the VAE also halves the sides."""
        return 2 * 2 ** len(vae["temperal_downsample"])  # the VAE of a video model; diffusers' spelling

    @classmethod
    def in_template(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """As in ``Policy``; without the start of the chat, whose features the pipeline drops before it cuts."""
        return f"{prompt}<|im_end|>\n<|im_start|>assistant\n"

    def text_encoders(self) -> Sequence[nn.Module]:
        """Qwen2.5-VL."""
        return (self.pipeline.text_encoder,)

    def encode(self, items: Sequence[Item]) -> QwenConditioning:
        """As in ``Policy``."""
        return QwenConditioning(**self._encode_texts(items))

    def _encode_texts(
        self, items: Sequence[Item], seen: Sequence[EncoderImages] | None = None
    ) -> dict[str, torch.Tensor | None]:
        """The fields of ``QwenConditioning``."""
        fields: dict[str, torch.Tensor | None] = {}
        for name, features in self._features_by_name(items, seen):
            rows = [row for (row,) in features]
            mask = torch.arange(max(map(len, rows))) < torch.tensor([len(row) for row in rows])[:, None]
            fields[f"{name}_embeds"] = pad_sequence(rows, batch_first=True).to(self.device)
            fields[f"{name}_mask"] = None if mask.all() else mask.to(self.device)
        return fields

    def _encode_text(self, text: str, *images: Image.Image) -> tuple[torch.Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            text, device=self._encoder_device, max_sequence_length=self.max_sequence_length,
            **self._images_argument(images),
        )  # fmt: skip
        return (embeds[0],)

    def _images_argument(self, images: tuple[Image.Image, ...]) -> dict[str, Any]:
        """How the pipeline's ``encode_prompt`` takes the images."""
        return {}

    def _tokens(self, inputs: ForwardInputs) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Image tokens (B, M, C), the generated ones first, and the rows and columns of each reference image."""
        return inputs.latents, []

    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, grids = self._tokens(inputs)
        shapes = [(1, *grid) for grid in (self._grid(inputs.height, inputs.width), *grids)]
        text = inputs.conditioning
        return self.transformer(
            hidden_states=tokens.to(self.dtype),
            timestep=inputs.sigma,  # the transformer multiplies by 1000
            encoder_hidden_states=text.negative_embeds if inputs.negative else text.prompt_embeds,
            encoder_hidden_states_mask=text.negative_mask if inputs.negative else text.prompt_mask,
            img_shapes=[shapes] * len(tokens),
            return_dict=False,
        )[0]

    def _combined(self, conditional: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """u·|c|/|u| with u = n + scale·(c − n), per token."""
        combined = super()._combined(conditional, negative)
        return combined * (conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def _pixels(self, unpacked: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, 1, h, w) of a one-frame video, standardized per channel, to the frame's pixels."""
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values, device=unpacked.device, dtype=unpacked.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
