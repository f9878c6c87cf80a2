"""FLUX.1-Kontext: edits a reference image, whose latents are appended to the generated ones as further tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import FluxKontextPipeline

from paco_grpo.policies.base import ForwardInputs
from paco_grpo.policies.flux import FluxConditioning, FluxPolicy
from paco_grpo.policies.reference_image import ReferenceConditioning, ReferenceImagePolicy
from paco_grpo.types import Item


@dataclass
class KontextConditioning(ReferenceConditioning, FluxConditioning):
    """FLUX's text features and the reference image."""


class FluxKontextPolicy(ReferenceImagePolicy, FluxPolicy):
    """FLUX.1-Kontext-dev and everything saved as a ``FluxKontextPipeline``; text, schedule and decoding are FLUX's."""

    pipeline_class = FluxKontextPipeline
    family = "FLUX Kontext"

    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """As the pipeline fits ``max_area``: both sides rounded, then down to the multiple (at least one)."""
        sides = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        height, width = (max(side // self.size_multiple, 1) * self.size_multiple for side in sides)
        return height, width

    @torch.no_grad()
    def encode(self, items: Sequence[Item]) -> KontextConditioning:
        """Text and reference image apart, so a text shared by two images is encoded once."""
        references = self._encode_references([self._read(item) for item in items])
        return KontextConditioning(**vars(super().encode(items)), **references)

    def _tokens(self, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, ((rows, columns),) = inputs.conditioning.with_references(inputs.latents)
        reference_ids = self._image_ids_for(rows, columns).clone()
        reference_ids[:, 0] = 1  # marks reference tokens, as in the pipeline; generated ones have 0
        return tokens, torch.cat([self._image_ids_for(*self._grid(inputs.height, inputs.width)), reference_ids])
