"""FLUX.1 text-to-image, through diffusers' FluxPipeline and its components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import FluxPipeline
from torch import nn

from paco_grpo.policies.base import ForwardInputs
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, lora_targets_with
from paco_grpo.policies.performance.flux import leave_out_unread_text
from paco_grpo.types import Conditioning, Item


@dataclass
class FluxConditioning(Conditioning):
    """Text features of FLUX: T5 tokens and CLIP's pooled vector."""

    prompt_embeds: torch.Tensor  # (B, L, D) in the policy's dtype
    pooled_prompt_embeds: torch.Tensor  # (B, P) in the policy's dtype


class FluxPolicy(DiffusersPolicy):
    """FLUX.1-dev and everything saved as a ``FluxPipeline``; its guidance is embedded, so there is no negative prompt."""

    pipeline_class = FluxPipeline
    family = "FLUX"
    tokenizer_folder = "tokenizer_2"  # T5's; CLIP always takes 77 tokens
    lora_targets = lora_targets_with("ff", "ff_context")

    def __init__(self, pipeline: FluxPipeline, **options) -> None:
        super().__init__(pipeline, **options)
        self._image_ids: dict[tuple[int, int], torch.Tensor] = {}
        leave_out_unread_text(pipeline.transformer)

    def text_encoders(self) -> Sequence[nn.Module]:
        """CLIP and T5."""
        return self.pipeline.text_encoder, self.pipeline.text_encoder_2

    def encode(self, items: Sequence[Item]) -> FluxConditioning:
        """As in ``Policy``."""
        columns = zip(*self._features([item.prompt for item in items]), strict=True)
        return FluxConditioning(*(torch.stack(column).to(self.device) for column in columns))

    def _encode_text(self, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            text, device=self._encoder_device, max_sequence_length=self.max_sequence_length
        )
        return embeds[0], pooled[0]

    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, position_ids = self._tokens(inputs)
        text, sigma = inputs.conditioning, inputs.sigma
        return self.transformer(
            hidden_states=tokens.to(self.dtype),
            timestep=sigma,  # the transformer multiplies by 1000
            guidance=torch.full_like(sigma, self.guidance_scale) if self._transformer_config.guidance_embeds else None,
            pooled_projections=text.pooled_prompt_embeds,
            encoder_hidden_states=text.prompt_embeds,
            txt_ids=position_ids.new_zeros(text.prompt_embeds.shape[1], 3),
            img_ids=position_ids,
            return_dict=False,
        )[0]

    def _tokens(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Image tokens (B, M, C), the generated ones first, and their position ids (M, 3)."""
        return inputs.latents, self._image_ids_for(*self._grid(inputs.height, inputs.width))

    def _image_ids_for(self, rows: int, columns: int) -> torch.Tensor:
        if (rows, columns) not in self._image_ids:  # made on the CPU, so kept on the device
            ids = self.pipeline._prepare_latent_image_ids(1, rows, columns, self.device, self.dtype)
            self._image_ids[rows, columns] = ids
        return self._image_ids[rows, columns]
