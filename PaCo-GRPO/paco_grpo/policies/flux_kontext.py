"""FLUX.1-Kontext: edits a reference image, whose latents are further tokens."""

import math
from typing import Any

from diffusers import FluxKontextPipeline
from typing_extensions import override

from paco_grpo.policies.flux import FluxPolicy
from paco_grpo.policies.reference_image import ReferenceImagePolicy
from paco_grpo.types import Item


class FluxKontextPolicy(ReferenceImagePolicy, FluxPolicy):
    """FLUX.1-Kontext-dev and everything saved as a ``FluxKontextPipeline``.

    Text, schedule and decoding are FLUX's.
    """

    pipeline_class = FluxKontextPipeline
    family = "FLUX Kontext"

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        """Without the pipeline's own resizing to about a megapixel."""
        arguments = super().pipeline_arguments(item)
        (reference,) = arguments["image"]
        area = item.height * item.width
        return arguments | {"image": reference, "max_area": area, "_auto_resize": False}

    @override
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """As the pipeline fits ``max_area``: both sides rounded, then down to whole tokens."""
        return self._whole(round(math.sqrt(area / aspect))), self._whole(
            round(math.sqrt(area * aspect))
        )
