"""Size of the JPEG file as a reward (DDPO, arXiv 2305.13301, §5.1).

It needs no model, so it suits a first run.
"""

import io

import numpy as np
from PIL import Image

from paco_grpo.rewards.registry import Reward

_SCALE = 500.0  # kilobytes; DDPO divides by it so that rewards are of order 1 at 512 px


def jpeg_incompressibility(quality: int = 95) -> Reward:
    """Reward = kilobytes of the JPEG / 500, (n,) float64 > 0."""

    def size(image: Image.Image) -> float:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, format="JPEG", quality=quality)
        return buffer.tell() / 1000 / _SCALE

    return lambda images, items: np.array([size(image) for image in images])


def jpeg_compressibility(quality: int = 95) -> Reward:
    """Reward = −kilobytes of the JPEG / 500, (n,) float64 < 0."""
    incompressibility = jpeg_incompressibility(quality)
    return lambda images, items: -incompressibility(images, items)
