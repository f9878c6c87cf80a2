"""FLUX.1-Kontext: edits a reference image, whose latents are appended to the generated ones as further tokens."""

import math

from diffusers import FluxKontextPipeline

from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.policies.reference_image import ReferenceImagePolicy


class FluxKontextPolicy(ReferenceImagePolicy, FluxPolicy):
    """FLUX.1-Kontext-dev and everything saved as a ``FluxKontextPipeline``; text, schedule and decoding are FLUX's."""

    pipeline_class = FluxKontextPipeline
    family = "FLUX Kontext"

    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """As the pipeline fits ``max_area``: both sides rounded, then down to the multiple (at least one)."""
        return self._whole(round(math.sqrt(area / aspect))), self._whole(
            round(math.sqrt(area * aspect))
        )
