"""For rewards that compare the sub-figures of a grid with each other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.registry import Reward
from paco_judge.grid import pairs, parse_layout, split_image


def check_panels(item: Item, reward: str) -> tuple[int, int]:
    """Rows and columns of the grid that ``item`` asks for. Raises ValueError: It is a single panel."""
    rows, cols = parse_layout(item.prompt)
    if rows * cols < 2:
        raise ValueError(
            f"{reward} needs a grid of sub-figures, but item {item.item_id} states none: {item.prompt!r}"
        )
    return rows, cols


def mean_over_pairs(name: str, features: Callable[[Sequence[Image.Image]], Any]) -> Reward:
    """The reward ``name``: mean cosine of two sub-figures over all unordered pairs of an image, in [−1, 1].

    ``features``: images → unit features, a tensor (n, C).
    """

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        cells = [
            split_image(image, *check_panels(item, name))
            for image, item in zip(images, items, strict=True)
        ]
        found = features([cell for its_cells in cells for cell in its_cells]).double().cpu().numpy()
        by_image = np.split(found, np.cumsum([len(its_cells) for its_cells in cells])[:-1])
        return np.array([np.mean([f[i] @ f[j] for i, j in pairs(len(f))]) for f in by_image])

    return score
