"""Size of the JPEG file as a reward (DDPO, arXiv 2305.13301, §5.1).

It needs no model, so it suits a first run.
"""

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from paco_grpo.rewards.contract import ScoreFn

_SCALE = 500.0  # kilobytes; DDPO divides by it so that rewards are of order 1 at 512 px


def jpeg_incompressibility(quality: int = 95) -> ScoreFn:
    """Reward = kilobytes of the JPEG / 500, (n,) float64 > 0."""

    return lambda images, items: _sizes(images, quality)


def jpeg_compressibility(quality: int = 95) -> ScoreFn:
    """Reward = −kilobytes of the JPEG / 500, (n,) float64 < 0."""
    return lambda images, items: -_sizes(images, quality)


def _sizes(images: Sequence[Image.Image], quality: int) -> np.ndarray:
    sizes: list[float] = []
    for image in images:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, format="JPEG", quality=quality)
        sizes.append(buffer.tell() / 1000 / _SCALE)
    return np.array(sizes)
