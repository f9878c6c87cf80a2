"""Rewards that compare the panels of a grid with each other; here, by DreamSim."""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np  # and no torch: the environment of a service need not have it
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.contract import ScoreFn, with_attributes
from paco_judge.encoders import DREAMSIM, DREAMSIM_FOLDER, Encoder, dreamsim_encoder
from paco_judge.grid import index_pairs, parse_layout, split_image


def grid_of(item: Item, reward: str) -> tuple[int, int]:
    """Rows and columns of the grid that ``item`` asks for.

    Raises ValueError: It is a single panel.
    """
    rows, cols = parse_layout(item.prompt)
    if rows * cols < 2:
        raise ValueError(
            f"{reward} needs a grid of panels, but the prompt states none: {item.prompt!r}"
        )
    return rows, cols


def mean_over_pairs(name: str, features: Callable[[Sequence[Image.Image]], Any]) -> ScoreFn:
    """The reward ``name``: mean cosine over all pairs of panels of an image, in [−1, 1].

    ``features``: images → unit features, a tensor (n, C).
    """

    def score(images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        panels = []
        ends = []  # of each image's panels
        for image, item in zip(images, items, strict=True):
            panels += split_image(image, *grid_of(item, name))
            ends.append(len(panels))
        vectors = features(panels).double().cpu().numpy()
        scores = []
        for of_image in np.split(vectors, ends[:-1]):
            cosines = [of_image[i] @ of_image[j] for i, j in index_pairs(len(of_image))]
            scores.append(np.mean(cosines))
        return np.array(scores)

    return score


def subfig_dreamsim(
    dreamsim_type: str = DREAMSIM,
    cache_dir: str = DREAMSIM_FOLDER,
    device: Any = "cpu",
    batch_size: int = 16,
) -> ScoreFn:
    """1 − DreamSim distance (arXiv 2306.09344), averaged over pairs of panels.

    Needs the package ``dreamsim`` (``pip install 'paco-grpo[dreamsim]'``), which downloads its own
    weights.

    ``dreamsim_type``: one of the package's names, such as ``ensemble``, ``dino_vitb16``,
    ``clip_vitb32`` or ``open_clip_vitb32``.
    """
    importlib.import_module("dreamsim")  # absent: before anything is loaded

    @cache
    def encoder() -> Encoder:
        return dreamsim_encoder(str(device), dreamsim_type, cache_dir)

    def features(images: Sequence[Image.Image]) -> Any:
        return encoder().unit_features(images, batch_size)

    return with_attributes(mean_over_pairs("subfig_dreamsim", features), where=("cache_dir",))


with_attributes(subfig_dreamsim, check_item=lambda item: grid_of(item, "subfig_dreamsim"))
