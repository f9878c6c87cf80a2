"""Rendered panels and their latents kept in memory, so that training waits neither for the renderer nor for a VAE.

Characters and views are indices into ``paco_toy.world``'s CHARACTERS and VIEWS. S is a panel's side in pixels, s in latents.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paco_toy.world import CHARACTERS, COLOURS, SHAPES, STYLES, VIEWS, random_jitter, render_panel, to_uint8

# How many values each fact about a panel has; ``panel_facts`` says which one a panel shows.
FACTS = {"style": len(STYLES), "colour": len(COLOURS), "shape": len(SHAPES), "view": len(VIEWS)}


def panel_facts(characters: np.ndarray, views: np.ndarray) -> dict[str, np.ndarray]:
    """The value of each of ``FACTS`` for index arrays of any equal shape."""
    rest, shape = np.divmod(characters, len(SHAPES))
    style, colour = np.divmod(rest, len(COLOURS))
    return {"style": style, "colour": colour, "shape": shape, "view": views}


def random_views(count: int, rng: np.random.Generator) -> np.ndarray:
    """Four different views per grid: int (count, 4)."""
    return rng.random((count, len(VIEWS))).argsort(axis=1)[:, :4]


def to_tensor(pixels: np.ndarray) -> torch.Tensor:
    """Images uint8 (B, H, W, 3) to float32 (B, 3, H, W) in [-1, 1]."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


class PanelCache:
    """All characters in all views, each with ``variants`` jitters, at one panel size; rendered on first use."""

    def __init__(self, side: int, variants: int, seed: int):
        rng = np.random.default_rng([seed, side])
        kinds = (len(CHARACTERS), len(VIEWS), variants)
        self.side, self.variants = side, variants
        self._jitters = [random_jitter(rng) for _ in np.ndindex(kinds)]
        self._pixels = np.empty((len(self._jitters), side, side, 3), dtype=np.uint8)
        self._rendered = np.zeros(len(self._jitters), dtype=bool)

    def get(self, characters: np.ndarray, views: np.ndarray, variants: np.ndarray) -> np.ndarray:
        """Panels for index arrays of any equal shape (...): uint8 (..., S, S, 3)."""
        numbers = (characters * len(VIEWS) + views) * self.variants + variants
        for number in np.unique(numbers)[~self._rendered[np.unique(numbers)]]:
            character, view = divmod(number // self.variants, len(VIEWS))
            panel = render_panel(CHARACTERS[character], VIEWS[view], self.side, self._jitters[number])
            self._pixels[number], self._rendered[number] = to_uint8(panel), True
        return self._pixels[numbers]

    def draw(self, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Panels for index arrays of any equal shape (...), with random jitters: uint8 (..., S, S, 3)."""
        return self.get(characters, views, rng.integers(self.variants, size=np.shape(characters)))

    def draw_grids(self, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """2x2 grids for (B, 4) indices: uint8 (B, 2S, 2S, 3)."""
        return self.assemble(self.draw(characters, views, rng))

    def assemble(self, panels: np.ndarray) -> np.ndarray:
        """Panels (B, 4, S, S, 3), row-major, to grids (B, 2S, 2S, 3)."""
        panels = panels.reshape(-1, 2, 2, self.side, self.side, 3)
        return panels.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 2 * self.side, 2 * self.side, 3)


class LatentCache:
    """Quadrants of VAE-encoded grids, so that any training grid is a gather.

    A panel's latents depend slightly on its quadrant (padding at the border) and on its neighbors (group norms). Each
    quadrant is therefore cut from whole random grids and used only in the same place.

    Attributes:
        latents: Panel side in pixels -> float32 (4, characters, views, 2, C, s, s).
    """

    def __init__(self, encode: Callable[[torch.Tensor], torch.Tensor], caches: dict[int, PanelCache], seed: int):
        """Args: encode: pixels (B, 3, H, W) in [-1, 1] -> the transformer's latents (B, C, H/4, W/4)."""
        rng = np.random.default_rng([seed, 1])
        self.latents = {side: self._encode(encode, cache, rng) for side, cache in caches.items()}

    @staticmethod
    @torch.no_grad()
    def _encode(encode: Callable, cache: PanelCache, rng: np.random.Generator) -> torch.Tensor:
        kinds, s = len(CHARACTERS) * len(VIEWS), cache.side // 4
        store = None
        for variant in range(2):
            order = np.stack([rng.permutation(kinds) for _ in range(4)], axis=1)  # each kind once in each quadrant
            for rows in np.array_split(order, 16):
                z = encode(to_tensor(cache.draw_grids(rows // len(VIEWS), rows % len(VIEWS), rng)))
                store = torch.empty(4, kinds, 2, z.shape[1], s, s) if store is None else store
                for q, (r, c) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
                    store[q, torch.from_numpy(rows[:, q]), variant] = z[:, :, r * s : (r + 1) * s, c * s : (c + 1) * s]
        return store.unflatten(1, (len(CHARACTERS), len(VIEWS)))

    def grids(self, side: int, characters: np.ndarray, views: np.ndarray, variants: np.ndarray) -> torch.Tensor:
        """Latents of grids for (B, 4) indices, variants in {0, 1}: float32 (B, C, 2s, 2s)."""
        c, v, j = map(torch.from_numpy, (characters, views, variants))
        q = [self.latents[side][i, c[:, i], v[:, i], j[:, i]] for i in range(4)]
        return torch.cat([torch.cat(q[:2], dim=3), torch.cat(q[2:], dim=3)], dim=2)
