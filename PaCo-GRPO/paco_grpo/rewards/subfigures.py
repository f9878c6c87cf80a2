"""For rewards that compare the sub-figures of a grid with each other."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image

from paco_grpo.types import Item
from paco_judge.grid import pairs, parse_layout, split_image


def check_panels(item: Item, reward: str) -> tuple[int, int]:
    """Rows and columns of the grid that ``item`` asks for. Raises ValueError: It is a single panel."""
    rows, cols = parse_layout(item.prompt)
    if rows * cols < 2:
        raise ValueError(f"{reward} needs a grid of sub-figures, but item {item.item_id} states none: {item.prompt!r}")
    return rows, cols


class SubfigurePairs:
    """Mean cosine of two sub-figures over all unordered pairs of an image.

    Args:
        name: For messages.
        features: Images → unit features (n, C).
        check: Called before training.
    """

    def __init__(
        self,
        name: str,
        features: Callable[[Sequence[Image.Image]], torch.Tensor],
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.features, self.check = name, features, check

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [−1, 1]."""
        grids = [check_panels(item, self.name) for item in items]
        cells = [split_image(image, *grid) for image, grid in zip(images, grids, strict=True)]
        features = self.features([cell for its_cells in cells for cell in its_cells]).double().cpu().numpy()
        by_image = np.split(features, np.cumsum([len(its_cells) for its_cells in cells])[:-1])
        return np.array([np.mean([f[i] @ f[j] for i, j in pairs(len(f))]) for f in by_image])
