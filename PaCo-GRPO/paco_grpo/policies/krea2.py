"""Krea 2: features of twelve layers of Qwen3-VL, Qwen-Image's VAE, guidance like Z-Image's."""

import torch
from diffusers import Krea2Pipeline
from typing_extensions import override

from paco_grpo.policies.diffusers_policy import ForwardInputs
from paco_grpo.policies.qwen_image import QwenParts
from paco_grpo.policies.true_cfg import ScaleFromZero
from paco_grpo.types import to_device


class Krea2Policy(ScaleFromZero, QwenParts):
    """Krea 2 Raw, Turbo and everything saved as a ``Krea2Pipeline``.

    Raw is meant for training, and its adapter for Turbo, which is distilled and takes scale 0.
    """

    pipeline_class = Krea2Pipeline
    family = "Krea 2"
    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_gate",
        "attn.to_out.0",
        "ff.gate",
        "ff.up",
        "ff.down",
    )

    @override
    def _encode_text(self, text: str, length: int) -> tuple[torch.Tensor]:
        """Features (L, layers, D) without the padding between prompt and suffix.

        The transformer masks padding, and all text tokens have the same position.
        """
        embeds, mask = self.pipeline.encode_prompt(
            text, device=self._encoder_device, max_sequence_length=length
        )
        return (embeds[mask],)

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        embeds, mask, _ = inputs.text
        grid = self._grid(inputs.height, inputs.width)
        key = (embeds.shape[1], *grid)
        if key not in self._ids:
            self._ids[key] = self.pipeline.prepare_position_ids(*key, self.device)
        return self.transformer(
            hidden_states=inputs.latents.to(self.dtype),
            timestep=inputs.sigma,  # the transformer multiplies by 1000
            position_ids=self._ids[key],
            encoder_hidden_states=embeds,
            encoder_attention_mask=None if mask is None else to_device(mask, self.device),
            return_dict=False,
        )[0]

    @override
    def _mu(self, tokens: int, num_steps: int) -> float:
        return 1.15 if self.pipeline.config.is_distilled else super()._mu(tokens, num_steps)

    @override
    def _unpack(self, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return self.pipeline._unpack_latents(tokens, height, width)
