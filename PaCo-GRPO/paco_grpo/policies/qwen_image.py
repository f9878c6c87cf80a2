"""Qwen-Image text-to-image, and what its editors share.

The text encoder is Qwen2.5-VL, the VAE is one of a video model, and guidance is true CFG.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, QwenImagePipeline
from torch import nn
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from paco_grpo.policies.base import PolicyLoadError, PolicySettings
from paco_grpo.policies.diffusers_policy import ForwardInputs, lora_targets_with
from paco_grpo.policies.true_cfg import TrueCfgPolicy
from paco_grpo.types import to_device


class QwenParts(TrueCfgPolicy):
    """What the other Qwen-Image models and Krea 2 share: text encoder and template, and the VAE."""

    @classmethod
    @override
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        """2x2 latents are a token, and each temporal level of the VAE also halves the sides."""
        return 2 * 2 ** len(
            vae["temperal_downsample"]
        )  # the VAE of a video model; diffusers' spelling

    @classmethod
    @override
    def in_template(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
        """Without the start of the chat, whose features the pipeline drops before it cuts."""
        return f"{prompt}<|im_end|>\n<|im_start|>assistant\n"

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """Qwen2.5-VL; in Krea 2, Qwen3-VL."""
        return (self.pipeline.text_encoder,)

    @override
    def _pixels(self, unpacked: torch.Tensor) -> torch.Tensor:
        """Pixels of standardized latents (B, C, 1, h, w) of a one-frame video."""
        vae = self.pipeline.vae
        mean = unpacked.new_tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
        std = unpacked.new_tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
        return vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]


class QwenImagePolicy(QwenParts):
    """Qwen-Image, Qwen-Image-2512 and everything saved as a ``QwenImagePipeline``.

    True CFG is on if ``negative_prompt`` is set and ``guidance_scale`` > 1. The guided velocity is
    rescaled to the norm of the conditional one at every token, as in the pipeline.
    """

    pipeline_class = QwenImagePipeline
    family = "Qwen-Image"
    text_limit = 1024
    lora_targets = lora_targets_with("img_mlp", "txt_mlp")

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        if pipeline.transformer.config.get("guidance_embeds"):
            raise PolicyLoadError(
                "diffusers cannot compute a guidance-distilled transformer (guidance_embeds): use "
                "Qwen/Qwen-Image-2512 or "
                "Qwen/Qwen-Image-Edit-2511"
            )
        super().__init__(pipeline, settings)

    @override
    def guidance_arguments(self) -> dict[str, object]:
        return {"true_cfg_scale": self.guidance_scale, "negative_prompt": self.negative_prompt}

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, grids = self._tokens(inputs)
        embeds, mask, _ = inputs.text
        return self.transformer(
            hidden_states=tokens.to(self.dtype),
            timestep=inputs.sigma,  # the transformer multiplies by 1000
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=None if mask is None else to_device(mask, self.device),
            img_shapes=[[(1, *grid) for grid in grids]] * len(tokens),
            return_dict=False,
        )[0]

    @override
    def _combined(self, conditional: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """u·|c|/|u| with u = n + scale·(c − n), per token."""
        combined = super()._combined(conditional, negative)
        norm = conditional.norm(dim=-1, keepdim=True)
        combined_norm = combined.norm(dim=-1, keepdim=True)
        return combined * (norm / combined_norm)
