"""Qwen-Image-Edit: the vision-language text encoder sees the reference image, and its latents are further tokens."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImageEditPipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from paco_grpo.policies.base import PolicyLoadError, unwrap
from paco_grpo.policies.diffusers_policy import lora_targets_with
from paco_grpo.policies.reference_image import Reference, ReferenceConditioning, ReferenceImagePolicy
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_ROUNDED_TO = 32  # pixels, by the pipeline's calculate_dimensions


@dataclass
class QwenEditConditioning(ReferenceConditioning):
    """Features of (reference image, instruction) and, for true CFG, of (reference image, negative prompt).

    Texts are padded to the longest of their call to ``encode``, with a mask if they differ. Selecting rows changes neither,
    so rollout and training compute the same numbers.
    """

    prompt_embeds: torch.Tensor  # (B, L, D) in the policy's dtype
    prompt_mask: torch.Tensor | None  # (B, L) bool, True = token; None = all have L tokens
    negative_embeds: torch.Tensor | None = None  # (B, L', D)
    negative_mask: torch.Tensor | None = None  # (B, L') bool


def mark_image_tokens(encoder, args, kwargs):
    """Forward pre-hook: image tokens get their rows and columns as positions (M-RoPE), as Qwen2.5-VL was trained.

    transformers 5 computes them from ``mm_token_type_ids``, which diffusers 0.42 does not pass on.
    """
    ids = kwargs["input_ids"]
    return args, {"mm_token_type_ids": (ids == encoder.config.image_token_id).int(), **kwargs}


class QwenImageEditPolicy(ReferenceImagePolicy):
    """Qwen-Image-Edit and everything saved as a ``QwenImageEditPipeline``.

    True CFG is on if ``negative_prompt`` is set and ``guidance_scale`` > 1. The guided velocity is rescaled to the norm of
    the conditional one at every token, as in the pipeline.
    """

    pipeline_class = QwenImageEditPipeline
    family = "Qwen-Image-Edit"
    has_true_cfg = True
    text_sees_image = True
    masks_text = True
    text_limit = 1024
    lora_targets = lora_targets_with("img_mlp", "txt_mlp")

    def __init__(self, pipeline: QwenImageEditPipeline, *, image_positions: str = "mrope", **options) -> None:
        if pipeline.transformer.config.guidance_embeds:
            raise PolicyLoadError(
                "the transformer is guidance-distilled (guidance_embeds), which diffusers' QwenImageTransformer2DModel "
                "cannot compute: use Qwen/Qwen-Image-Edit"
            )
        super().__init__(pipeline, **options)
        if image_positions == "mrope":
            pipeline.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)
            self.pipeline_setup = (
                f"{inspect.getsource(mark_image_tokens)}\n\n"
                "pipe.text_encoder.register_forward_pre_hook(mark_image_tokens, with_kwargs=True)"
            )
        self.guided = self.negative_prompt is not None and self.guidance_scale > 1
        if (self.negative_prompt is not None) != (self.guidance_scale > 1):
            logger.warning(
                "no true CFG: config.sample.guidance_scale is %g and config.sample.negative_prompt is %r, but it needs a "
                "scale above 1 and a negative prompt (a space is enough)",
                self.guidance_scale, self.negative_prompt,
            )  # fmt: skip

    @classmethod
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        """2x2 latents are a token, and each temporal level of the VAE also halves the sides."""
        return 2 * 2 ** len(vae["temperal_downsample"])  # the VAE of a video model; diffusers' spelling

    def text_encoders(self) -> Sequence[nn.Module]:
        """Qwen2.5-VL."""
        return (self.pipeline.text_encoder,)

    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """As the pipeline sizes reference images: both sides to the nearest multiple of 32 pixels (at least one)."""
        width, height, _ = calculate_dimensions(area, aspect)
        return max(height, _ROUNDED_TO), max(width, _ROUNDED_TO)

    @torch.no_grad()
    def encode(self, items: Sequence[Item]) -> QwenEditConditioning:
        """Each (image, text) goes through the text encoder once, alone."""
        references = [self._read(item) for item in items]
        negative = None, None
        with self.encoders_held():
            embeds, mask = self._encode_texts(references, [item.prompt for item in items])
            if self.guided:
                negative = self._encode_texts(references, [self.negative_prompt] * len(items))
        return QwenEditConditioning(
            prompt_embeds=embeds,
            prompt_mask=mask,
            negative_embeds=negative[0],
            negative_mask=negative[1],
            **self._encode_references(references),
        )

    def constant_parts(self) -> Sequence[nn.Module]:
        """The projection of the text; with true CFG two texts take turns."""
        transformer = unwrap(self.transformer)
        return () if self.guided else (transformer.txt_norm, transformer.txt_in)

    def _encode_texts(
        self, references: Sequence[Reference], texts: Sequence[str]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = [
            self._texts.get((text, reference.key), lambda t=text, r=reference: (self._encode_text(t, r),))[0]
            for reference, text in zip(references, texts, strict=True)
        ]
        embeds = pad_sequence(rows, batch_first=True).to(self.device)
        lengths = torch.tensor([len(row) for row in rows])
        if (lengths == embeds.shape[1]).all():
            return embeds, None
        return embeds, (torch.arange(embeds.shape[1]) < lengths[:, None]).to(self.device)

    def _encode_text(self, text: str, reference: Reference) -> torch.Tensor:
        """Features (L, D) of the instruction and the image, without those of the pipeline's fixed prefix."""
        with self._offloaded_text.at_work():
            embeds, _ = self.pipeline.encode_prompt(
                prompt=self._shortened(text), image=reference.image, device=self.pipeline.text_encoder.device
            )
        return embeds[0].to(self.dtype)

    def _shortened(self, text: str) -> str:
        """``text`` cut to ``max_sequence_length`` tokens, as FLUX's pipeline does; Qwen's takes any length."""
        tokenizer = self.pipeline.tokenizer
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        if len(tokens) <= self.max_sequence_length:
            return text
        logger.warning(
            "instruction cut to config.max_sequence_length=%d of its %d tokens: %.80s…",
            self.max_sequence_length, len(tokens), text,
        )  # fmt: skip
        return tokenizer.decode(tokens[: self.max_sequence_length])

    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.unsqueeze(2)  # a video of one frame

    def velocity(
        self,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: QwenEditConditioning,
        height: int,
        width: int,
        guided: bool = True,
    ) -> torch.Tensor:
        """With true CFG, v = u·|v_c|/|u| with u = v_n + scale·(v_c − v_n), per token."""
        tokens, rows, columns = conditioning.with_reference(latents)
        shapes = [(1, *self._grid(height, width)), (1, rows, columns)]

        def forward(name: str, text: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            with self.autocast(), self._cache_context(name):
                velocity = self.transformer(
                    hidden_states=tokens.to(self.dtype),
                    timestep=sigma,  # the transformer multiplies by 1000
                    encoder_hidden_states=text,
                    encoder_hidden_states_mask=mask,
                    img_shapes=[shapes] * latents.shape[0],
                    return_dict=False,
                )[0]
            return velocity[:, : latents.shape[1]].float()

        conditional = forward("text", conditioning.prompt_embeds, conditioning.prompt_mask)
        if not guided or conditioning.negative_embeds is None:
            return conditional
        negative = forward("negative", conditioning.negative_embeds, conditioning.negative_mask)
        combined = negative + self.guidance_scale * (conditional - negative)
        return combined * (conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))

    def _pixels(self, unpacked: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, 1, h, w) of a one-frame video, standardized per channel, to the frame's pixels."""
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values, device=unpacked.device, dtype=unpacked.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
