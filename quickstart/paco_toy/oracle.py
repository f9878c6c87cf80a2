"""The oracle: reads from pixel statistics alone which character and view each panel of a grid shows. Nothing trains on it.

Each panel is compared with the rendering of every character in every view, and with an empty panel. The nearest rendering
names the panel; a panel that is nearest to empty, or further than ``INVALID_RMS`` from everything, is invalid.

The factories at the end are rewards for PaCo-GRPO, given by import path (`paco_toy.oracle:oracle_consistency`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from paco_toy.world import CHARACTER_INDEX, CHARACTERS, LABELS, VIEW_INDEX, VIEWS, Character, View, render_panel

INVALID_RMS = 0.12  # root mean square pixel distance, pixels in [0, 1]
_FIRST, _SECOND = np.triu_indices(4, k=1)  # the six pairs of panels


@dataclass(frozen=True)
class Reading:
    """What B grids of four panels show. Arrays (B, 4), panels row-major; results (B,) float64."""

    character: np.ndarray  # int, index into CHARACTERS; meaningless where invalid
    view: np.ndarray  # int, index into VIEWS; meaningless where invalid
    valid: np.ndarray  # bool
    rms: np.ndarray  # float32, distance to the nearest rendering

    def _pairs(self, agree: Callable[[np.ndarray, np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
        valid = self.valid[:, _FIRST] & self.valid[:, _SECOND]
        return np.mean(valid & agree(values[:, _FIRST], values[:, _SECOND]), axis=1)

    def consistency(self) -> np.ndarray:
        """Share of the six panel pairs with the same character, both valid."""
        return self._pairs(np.equal, self.character)

    def distinctness(self) -> np.ndarray:
        """Share of the six panel pairs in different views, both valid: four identical panels give 0."""
        return self._pairs(np.not_equal, self.view)

    def alignment(self, character: np.ndarray) -> np.ndarray:
        """Share of panels that show the named character, int (B,)."""
        return np.mean(self.valid & (self.character == character[:, None]), axis=1)

    def view_following(self, views: np.ndarray) -> np.ndarray:
        """Share of panels in the requested view, int (B, 4)."""
        return np.mean(self.valid & (self.view == views), axis=1)


@lru_cache(maxsize=4)
def _templates(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Renderings (K, side*side*3) of all characters and views, an empty panel last, and their squared norms (K,)."""
    panels = [render_panel(c, v, side) for c in CHARACTERS for v in VIEWS]
    panels.append(np.ones((side, side, 3), dtype=np.float32))
    flat = np.stack(panels).reshape(len(panels), -1).astype(np.float32)
    return flat, np.einsum("kd,kd->k", flat, flat)


def _panels(image: Image.Image, side: int) -> np.ndarray:
    """A grid image as four flattened panels (4, side*side*3), reduced by area averaging where it is larger."""
    if image.size != (2 * side, 2 * side):
        image = image.resize((2 * side, 2 * side), Image.Resampling.BOX)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    return pixels.reshape(2, side, 2, side, 3).transpose(0, 2, 1, 3, 4).reshape(4, -1)


def read_grids(images: Sequence[Image.Image]) -> Reading:
    """Reads 2x2 grids of any square size from 32 px on (panels above 32 px are averaged down to 32 px)."""
    characters, views, valid, distances = [], [], [], []
    for image in images:
        side = min(image.width // 2, 32)
        templates, norms = _templates(side)
        panels = _panels(image, side)
        squared = np.einsum("pd,pd->p", panels, panels)[:, None] - 2 * panels @ templates.T + norms
        nearest = squared.argmin(axis=1)
        rms = np.sqrt(np.maximum(squared[np.arange(4), nearest], 0) / panels.shape[1])
        empty = nearest == len(norms) - 1
        characters.append(np.where(empty, -1, nearest // len(VIEWS)))
        views.append(np.where(empty, -1, nearest % len(VIEWS)))
        valid.append(~empty & (rms <= INVALID_RMS))
        distances.append(rms)
    return Reading(np.array(characters), np.array(views), np.array(valid), np.array(distances, dtype=np.float32))


def read_prompt(prompt: str) -> tuple[int, tuple[int, ...]]:
    """The character and the four views that a toy prompt names, as indices.

    Raises:
        ValueError: The prompt is not one of the shapes world.
    """
    try:
        head, *panels = re.split("|".join(map(re.escape, LABELS)), prompt)
        character = CHARACTER_INDEX[Character(*head.split(".")[0].split()[-3:])]
        views = tuple(VIEW_INDEX[View(*text.strip().rstrip(".").split())] for text in panels)
        if len(views) != len(LABELS):
            raise ValueError(f"{len(views)} panels")
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"not a prompt of the shapes world ({error}): {prompt!r}") from error
    return character, views


Scorer = Callable[[Sequence[Image.Image], Sequence], np.ndarray]


def oracle_consistency() -> Scorer:
    """Reward factory: ``Reading.consistency``, float64 (B,)."""
    return lambda images, items: read_grids(images).consistency()


def oracle_alignment() -> Scorer:
    """Reward factory: ``Reading.alignment`` with the prompt's character, float64 (B,)."""
    return lambda images, items: read_grids(images).alignment(np.array([read_prompt(i.prompt)[0] for i in items]))


def oracle_view() -> Scorer:
    """Reward factory: ``Reading.view_following`` with the prompt's views, float64 (B,)."""
    return lambda images, items: read_grids(images).view_following(np.array([read_prompt(i.prompt)[1] for i in items]))


def oracle_valid() -> Scorer:
    """Reward factory: share of valid panels, float64 (B,)."""
    return lambda images, items: read_grids(images).valid.mean(axis=1)


def oracle_distinct() -> Scorer:
    """Reward factory: ``Reading.distinctness``, float64 (B,)."""
    return lambda images, items: read_grids(images).distinctness()
