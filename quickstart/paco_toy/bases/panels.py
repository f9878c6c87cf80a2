"""Rendered panels kept in memory, so that training never waits for the renderer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paco_toy.world import CHARACTERS, VIEWS, random_jitter, render_panel


class PanelCache:
    """All characters in all views, each with `variants` jitters, at one panel size.

    `pixels`: uint8 (characters, views, variants, S, S, 3).
    """

    def __init__(self, side: int, variants: int, seed: int):
        rng = np.random.default_rng([seed, side])
        self.side = side
        self.pixels = np.empty((len(CHARACTERS), len(VIEWS), variants, side, side, 3), dtype=np.uint8)
        for c, character in enumerate(CHARACTERS):
            for v, view in enumerate(VIEWS):
                for j in range(variants):
                    panel = render_panel(character, view, side, random_jitter(rng))
                    self.pixels[c, v, j] = np.clip(np.rint(panel * 255), 0, 255)

    def save(self, path: Path) -> None:
        """Writes the panels as a plain .npy file."""
        np.save(path, self.pixels)

    @classmethod
    def load(cls, path: Path) -> PanelCache:
        """Reads what `save` wrote."""
        cache = cls.__new__(cls)
        cache.pixels = np.load(path, allow_pickle=False)
        cache.side = cache.pixels.shape[3]
        return cache

    def draw(self, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Panels for index arrays of any equal shape (...), a random jitter each: uint8 (..., S, S, 3)."""
        return self.pixels[characters, views, rng.integers(self.pixels.shape[2], size=np.shape(characters))]

    def draw_grids(self, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """2x2 grids for (B, 4) indices: uint8 (B, 2S, 2S, 3)."""
        return self.assemble(self.draw(characters, views, rng))

    def assemble(self, panels: np.ndarray) -> np.ndarray:
        """Panels (B, 4, S, S, 3), row-major, to grids (B, 2S, 2S, 3)."""
        panels = panels.reshape(-1, 2, 2, self.side, self.side, 3)
        return panels.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 2 * self.side, 2 * self.side, 3)


def random_views(count: int, rng: np.random.Generator) -> np.ndarray:
    """Four different views a grid: int (count, 4)."""
    return rng.random((count, len(VIEWS))).argsort(axis=1)[:, :4]
