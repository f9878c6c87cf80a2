"""Rewards of tools/golden_runs.py, which need no judge."""

from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

Score = Callable[[Sequence[Image.Image], Sequence[object]], np.ndarray]


def brightness(scale: float = 1.0) -> Score:
    """Mean red minus mean blue, which varies between images of random weights."""

    def score(images: Sequence[Image.Image], items: Sequence[object]) -> np.ndarray:
        means = [np.asarray(image, dtype=np.float64).mean(axis=(0, 1)) for image in images]
        return np.array([scale * (red - blue) / 255 for red, _, blue in means])

    return score


def redness() -> Score:
    """Mean red."""

    def score(images: Sequence[Image.Image], items: Sequence[object]) -> np.ndarray:
        return np.array([np.asarray(image)[..., 0].mean() / 255 for image in images])

    return score
