"""Rewards of the shapes world that can be had without following a prompt: planted, the health signals must notice them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image

from paco_toy.oracle import Scorer
from paco_toy.world import CHARACTERS, VIEWS, render_panel

_SIDE = 32  # of a panel that is compared
_FIRST, _SECOND = np.triu_indices(4, k=1)
PERIOD = 8  # rows from line to line, of an image of 64 rows


def identical_panels() -> Scorer:
    """Reward factory: mean correlation of the pixels of two panels; float64 (B,), 1 = four times the same picture."""

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        panels = _panels(images)
        panels -= panels.mean(axis=2, keepdims=True)
        panels /= np.maximum(np.linalg.norm(panels, axis=2, keepdims=True), 1e-6)  # an empty panel is like none
        return (panels[:, _FIRST] * panels[:, _SECOND]).sum(axis=2).mean(axis=1)

    return score


def fixed_character(number: int = 0) -> Scorer:
    """Reward factory: how near the panels are to one character, whatever the prompt names; float64 (B,), 1 = it is in all.

    Args:
        number: Index into CHARACTERS.
    """

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        squared = np.square(_panels(images)[:, :, None] - _views_of(number)).mean(axis=3)  # (B, 4, views)
        return 1 - np.sqrt(squared.min(axis=2)).mean(axis=1)

    return score


def lines() -> Scorer:
    """Reward factory: how much darker every eighth of 64 rows is than the others; float64 (B,), 1 = black lines on white."""

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        rows = np.array([_pixels(image).mean(axis=(1, 2)) for image in images])
        drawn = np.arange(2 * _SIDE) % PERIOD == PERIOD // 2
        return rows[:, ~drawn].mean(axis=1) - rows[:, drawn].mean(axis=1)

    return score


def _pixels(image: Image.Image) -> np.ndarray:
    """(64, 64, 3) float64 in [0, 1]."""
    small = image.convert("RGB").resize((2 * _SIDE, 2 * _SIDE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255


def _panels(images: Sequence[Image.Image]) -> np.ndarray:
    """(B, 4, 3072): the panels of each image."""
    grids = np.array([_pixels(image) for image in images]).reshape(-1, 2, _SIDE, 2, _SIDE, 3)
    return grids.transpose(0, 1, 3, 2, 4, 5).reshape(len(images), 4, -1)


@lru_cache(maxsize=4)
def _views_of(number: int) -> np.ndarray:
    """(views, 3072): the renderings of a character."""
    return np.stack([render_panel(CHARACTERS[number], view, _SIDE) for view in VIEWS]).reshape(len(VIEWS), -1)
