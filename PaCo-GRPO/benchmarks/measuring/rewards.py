"""A reward that takes a known time, to see how much of it is hidden behind sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np


def sleeping(seconds_per_image: float = 0.1) -> Callable[[Sequence, Sequence], np.ndarray]:
    """Mean grey of each image in [0, 1], (n,), after ``seconds_per_image`` of waiting for each."""

    def score(images: Sequence, items: Sequence) -> np.ndarray:
        time.sleep(seconds_per_image * len(images))
        return np.array([np.asarray(image.convert("L")).mean() / 255 for image in images])

    return score
