"""Stable Diffusion 3.5 (medium, large): two CLIP encoders and T5, true CFG."""

from collections.abc import Sequence

import torch
from diffusers import StableDiffusion3Pipeline
from torch import nn
from typing_extensions import override

from paco_grpo.policies.base import PolicySettings
from paco_grpo.policies.diffusers_policy import FlatLatents, ForwardInputs, lora_targets_with
from paco_grpo.policies.true_cfg import TrueCfgPolicy


class StableDiffusion3Policy(FlatLatents, TrueCfgPolicy):
    """Stable Diffusion 3 and 3.5, and everything saved as a ``StableDiffusion3Pipeline``.

    True CFG is on if ``guidance_scale`` > 1, against an empty prompt unless ``negative_prompt``
    says otherwise. Padding is attended to, so ``max_sequence_length`` changes images.
    """

    pipeline_class = StableDiffusion3Pipeline
    family = "Stable Diffusion 3"
    tokenizer_folder = "tokenizer_3"  # T5's; CLIP always takes 77 tokens
    default_negative = ""
    linear_sigmas = False
    lora_targets = lora_targets_with("ff", "ff_context")

    def __init__(self, pipeline: StableDiffusion3Pipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        # For compile_repeated_blocks; diffusers does not set it.
        pipeline.transformer._repeated_blocks = ["JointTransformerBlock"]
        # 3.5 medium: a second attention, of the image alone
        if self._transformer_config.dual_attention_layers:
            self.lora_targets += tuple(
                f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")
            )

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Both CLIPs and T5."""
        return (
            self.pipeline.text_encoder,
            self.pipeline.text_encoder_2,
            self.pipeline.text_encoder_3,
        )

    @override
    def _encode_text(self, text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """CLIP's 77 tokens before T5's, and both CLIPs' pooled vectors."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            text,
            None,
            None,
            device=self._encoder_device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return embeds[0], pooled[0]

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        embeds, _, pooled = inputs.text
        latents = self._unpack(inputs.latents, inputs.height, inputs.width)
        velocity = self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=1000 * inputs.sigma,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return self._pack(velocity)
