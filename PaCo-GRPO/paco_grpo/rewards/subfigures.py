"""For rewards that compare the sub-figures of a grid with each other."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.registry import Reward
from paco_judge.grid import index_pairs, parse_layout, split_image


def check_panels(item: Item, reward: str) -> tuple[int, int]:
    """Rows and columns of the grid that ``item`` asks for.

    Raises ValueError: It is a single panel.
    """
    rows, cols = parse_layout(item.prompt)
    if rows * cols < 2:
        raise ValueError(
            f"{reward} needs a grid of sub-figures, but item {item.item_id} states none: "
            f"{item.prompt!r}"
        )
    return rows, cols


def mean_over_pairs(name: str, features: Callable[[Sequence[Image.Image]], Any]) -> Reward:
    """The reward ``name``: mean cosine over all pairs of sub-figures of an image, in [−1, 1].

    ``features``: images → unit features, a tensor (n, C).
    """

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        cells = []
        ends = []  # of each image's cells
        for image, item in zip(images, items, strict=True):
            cells += split_image(image, *check_panels(item, name))
            ends.append(len(cells))
        vectors = features(cells).double().cpu().numpy()
        scores = []
        for of_image in np.split(vectors, ends[:-1]):
            cosines = [of_image[i] @ of_image[j] for i, j in index_pairs(len(of_image))]
            scores.append(np.mean(cosines))
        return np.array(scores)

    return score
