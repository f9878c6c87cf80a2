"""Rendered panels, their latents, and edits, kept in memory: training waits neither for the renderer nor for a VAE.

Characters and views are indices into ``paco_toy.world``'s CHARACTERS and VIEWS. S is a panel's side in pixels, s in latents.
"""

import dataclasses
from functools import cache

import numpy as np
import torch
from diffusers import AutoencoderKL

from paco_toy.edits import Edit
from paco_toy.world import (
    ATTRIBUTES,
    CHARACTERS,
    VIEWS,
    Character,
    random_jitter,
    render_panel,
    to_uint8,
)

DEPARTURE = 0.35  # share of edits whose target departs from the instruction
# How a target departs: nothing changes; the panel gets another value; another panel gets the value; a second panel changes
# as well. The last one still follows the instruction.
KINDS = {"untouched": 0.35, "other value": 0.30, "other panel": 0.15, "one more": 0.20}


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
    """Panels for index arrays of any equal shape (...), each with one of four jitters: uint8 (..., S, S, 3)."""
    variants = rng.integers(4, size=characters.shape)
    panels = [
        _panel(side, *kind)
        for kind in np.stack([characters, views, variants], -1).reshape(-1, 3).tolist()
    ]
    return np.stack(panels).reshape(*characters.shape, side, side, 3)


def draw_grids(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    """2x2 grids for (B, 4) indices, panels row-major: float32 (B, 3, 2S, 2S) in [-1, 1]."""
    panels = torch.from_numpy(draw(side, characters, views, rng)).float() / 127.5 - 1
    return _assemble(panels.movedim(-1, 2))


def _assemble(panels: torch.Tensor) -> torch.Tensor:
    """(B, 4, C, S, S) to (B, C, 2S, 2S)."""
    return panels.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


@torch.no_grad()
def encode_quadrants(
    vae: AutoencoderKL, sides: tuple[int, ...], seed: int
) -> dict[int, torch.Tensor]:
    """Quadrants of VAE-encoded grids: panel side in pixels -> float32 (4, characters, views, 2, C, s, s).

    A panel's latents depend slightly on its place (padding) and its neighbors (group norms), so each quadrant is cut
    from whole random grids and used only in the same place.
    """
    rng, kinds = np.random.default_rng([seed, 1]), len(CHARACTERS) * len(VIEWS)
    latents = {}
    for side in sides:
        store = torch.empty(4, kinds, 2, vae.config.latent_channels, side // 4, side // 4)
        for variant in range(2):
            order = np.stack(
                [rng.permutation(kinds) for _ in range(4)], axis=1
            )  # each kind once in each quadrant
            for rows in np.array_split(order, 16):
                z = vae.encode(
                    draw_grids(side, *np.divmod(rows, len(VIEWS)), rng)
                ).latent_dist.mode()
                z = (
                    z - vae.config.shift_factor
                ) * vae.config.scaling_factor  # as FluxPipeline uses them
                quadrants = (
                    z.unflatten(3, (2, -1))
                    .unflatten(2, (2, -1))
                    .permute(2, 4, 0, 1, 3, 5)
                    .flatten(0, 1)
                )
                store[torch.arange(4)[:, None], torch.from_numpy(rows.T), variant] = quadrants
        latents[side] = store.unflatten(1, (len(CHARACTERS), len(VIEWS)))
    return latents


def latent_grids(quadrants: torch.Tensor, *indices: np.ndarray) -> torch.Tensor:
    """Latents of grids for (B, 4) indices of characters, views and variants (0 or 1): float32 (B, C, 2s, 2s)."""
    return _assemble(quadrants[(torch.arange(4), *map(torch.from_numpy, indices))])


def edit_target(edit: Edit, departure: float, rng: np.random.Generator) -> tuple[Character, ...]:
    """The four characters of an edit's training target, which departs from the instruction with a given probability.

    A base editor thus does not follow instructions reliably: that is left to RL.
    """
    if rng.random() >= departure:
        return edit.edited()

    def other(place: int, *values: str) -> Character:
        """With another value of the attribute, except ``values``."""
        character = edit.characters[place]
        rest = set(ATTRIBUTES[edit.attribute]) - {getattr(character, edit.attribute), *values}
        return dataclasses.replace(character, **{edit.attribute: str(rng.choice(sorted(rest)))})

    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    elsewhere = int(edit.place + rng.integers(1, 4)) % 4
    after = list(edit.edited() if kind == "one more" else edit.characters)
    if kind == "one more":
        after[elsewhere] = other(elsewhere)
    if kind == "other value":
        after[edit.place] = other(edit.place, edit.value)
    if kind == "other panel":
        after[elsewhere] = dataclasses.replace(after[elsewhere], **{edit.attribute: edit.value})
    return tuple(after)
