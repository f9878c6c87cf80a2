"""Rendered panels and their latents.

They are kept in memory, so that training waits neither for the renderer nor for a VAE. Characters
and views are indices into ``paco_toy.world``'s CHARACTERS and VIEWS. S is a panel's side in pixels,
s in latents.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from diffusers import AutoencoderKL

from paco_toy.world import CHARACTERS, VIEWS, random_jitter, render_panel, to_uint8


def random_views(count: int, rng: np.random.Generator) -> np.ndarray:
    """Four different views per grid: int (count, 4)."""
    return rng.random((count, len(VIEWS))).argsort(axis=1)[:, :4]


@cache
def _panel(side: int, character: int, view: int, variant: int) -> np.ndarray:
    jitter = random_jitter(np.random.default_rng([side, character, view, variant]))
    return to_uint8(render_panel(CHARACTERS[character], VIEWS[view], side, jitter))


def draw(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Panels for index arrays of any equal shape (...): uint8 (..., S, S, 3).

    Each has one of four jitters.
    """
    variants = rng.integers(4, size=characters.shape)
    kinds = np.stack([characters, views, variants], axis=-1).reshape(-1, 3)
    panels = [_panel(side, *kind) for kind in kinds.tolist()]
    return np.stack(panels).reshape(*characters.shape, side, side, 3)


def draw_grids(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    """2x2 grids for (B, 4) indices, panels row-major: float32 (B, 3, 2S, 2S) in [-1, 1]."""
    panels = torch.from_numpy(draw(side, characters, views, rng)).float() / 127.5 - 1
    return _assemble(panels.movedim(-1, 2))


def _assemble(panels: torch.Tensor) -> torch.Tensor:
    """(B, 4, C, S, S) to (B, C, 2S, 2S)."""
    rows_and_columns = panels.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5)
    return rows_and_columns.flatten(4).flatten(2, 3)


def _quadrants(grids: torch.Tensor) -> torch.Tensor:
    """(B, C, 2s, 2s) to (4, B, C, s, s): the inverse of ``_assemble``, quadrants first."""
    rows_and_columns = grids.unflatten(3, (2, -1)).unflatten(2, (2, -1))
    return rows_and_columns.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)


@torch.no_grad()
def encode_quadrants(
    vae: AutoencoderKL, sides: Sequence[int], seed: int
) -> dict[int, torch.Tensor]:
    """Quadrants of VAE-encoded grids, for each panel side in pixels.

    A panel's latents depend slightly on its place (padding) and its neighbors (group norms), so
    each quadrant is cut from whole random grids and used only in the same place.

    Returns:
        side -> float32 (4, characters, views, 2 variants, C, s, s).
    """
    rng = np.random.default_rng([seed, 1])
    num_kinds = len(CHARACTERS) * len(VIEWS)
    latents = {}
    for side in sides:
        shape = (vae.config.latent_channels, side // 4, side // 4)
        store = torch.empty(4, num_kinds, 2, *shape)
        for variant in range(2):
            # Each quadrant shows each kind once.
            order = np.stack([rng.permutation(num_kinds) for _ in range(4)], axis=1)
            for kinds in np.array_split(order, 16):
                characters, views = np.divmod(kinds, len(VIEWS))
                grids = draw_grids(side, characters, views, rng)
                z = vae.encode(grids).latent_dist.mode()
                # FluxPipeline uses them like this.
                z = (z - vae.config.shift_factor) * vae.config.scaling_factor
                quadrant = torch.arange(4)[:, None]
                store[quadrant, torch.from_numpy(kinds.T), variant] = _quadrants(z)
        latents[side] = store.unflatten(1, (len(CHARACTERS), len(VIEWS)))
    return latents


def latent_grids(
    quadrants: torch.Tensor, characters: np.ndarray, views: np.ndarray, variants: np.ndarray
) -> torch.Tensor:
    """Latents of grids for (B, 4) indices, variants 0 or 1: float32 (B, C, 2s, 2s)."""
    indices = [torch.from_numpy(index) for index in (characters, views, variants)]
    return _assemble(quadrants[torch.arange(4), *indices])
