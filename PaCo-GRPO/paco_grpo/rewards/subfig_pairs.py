"""What subfig_clipI and subfig_dreamsim share: a similarity, averaged over the pairs of a grid's sub-figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paco_grpo.rewards.panels import check_panels
from paco_judge.grid import pairs, split_image

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from paco_grpo.types import Item


class SubfigPairs:
    """Mean over all unordered pairs of sub-figures of the cosine of their features.

    Args:
        name: Of the reward, for messages.
        features: Images → unit features (n, C).
    """

    def __init__(self, name: str, features: Callable[[Sequence[Image.Image]], torch.Tensor]) -> None:
        self.name, self.features = name, features

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [−1, 1].

        Raises:
            ValueError: A prompt has a single panel, so there is nothing to compare.
        """
        cells, counts = [], []
        for image, item in zip(images, items, strict=True):
            rows, cols = check_panels(self.name, item)
            cells.extend(split_image(image, rows, cols))
            counts.append(rows * cols)
        features = self.features(cells).double().cpu().numpy()
        return np.array([_mean_of_pairs(part) for part in np.split(features, np.cumsum(counts)[:-1])])


def _mean_of_pairs(features: np.ndarray) -> float:
    return float(np.mean([features[i] @ features[j] for i, j in pairs(len(features))]))
