"""FLUX.1 text-to-image, through diffusers' FluxPipeline and its components."""

from collections.abc import Sequence

import torch
from diffusers import FluxPipeline
from torch import nn
from typing_extensions import override

from paco_grpo.policies.diffusers_policy import DiffusersPolicy, ForwardInputs, lora_targets_with


class FluxPolicy(DiffusersPolicy):
    """FLUX.1-dev and everything saved as a ``FluxPipeline``; its guidance is embedded."""

    pipeline_class = FluxPipeline
    family = "FLUX"
    tokenizer_folder = "tokenizer_2"  # T5's; CLIP always takes 77 tokens
    lora_targets = lora_targets_with("ff", "ff_context")

    @override
    def text_encoders(self) -> Sequence[nn.Module]:
        """CLIP and T5."""
        return self.pipeline.text_encoder, self.pipeline.text_encoder_2

    @override
    def _encode_text(self, text: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            text, device=self._encoder_device, max_sequence_length=length
        )
        return embeds[0], pooled[0]

    @override
    def _forward(self, inputs: ForwardInputs) -> torch.Tensor:
        tokens, grids = self._tokens(inputs)
        embeds, _, pooled = inputs.text
        image_ids = self._image_ids(*grids)
        return self.transformer(
            hidden_states=tokens.to(self.dtype),
            timestep=inputs.sigma,  # the transformer multiplies by 1000
            guidance=self._embedded_guidance(inputs.sigma),
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=image_ids.new_zeros(embeds.shape[1], 3),
            img_ids=image_ids,
            return_dict=False,
        )[0]

    def _image_ids(self, *grids: tuple[int, int]) -> torch.Tensor:
        """Positions (M, 3) of the tokens of all images; references are marked by a 1."""
        if grids not in self._ids:
            ids_by_image = [
                self.pipeline._prepare_latent_image_ids(1, *grid, self.device, self.dtype)
                for grid in grids
            ]
            for ids in ids_by_image[1:]:
                ids[:, 0] = 1  # as in the pipeline
            self._ids[grids] = torch.cat(ids_by_image)
        return self._ids[grids]
