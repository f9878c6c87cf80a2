"""Panels that show nothing clear, as a weak generator draws them: a judge that never saw any can be exploited with them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from PIL import Image

from paco_toy.oracle import read_grids
from paco_toy.world import CHARACTERS, VIEWS, assemble_grid, grid_prompt, random_jitter, render_panel, to_uint8

SIDES = (32, 64)  # pixels of the grids that FLUX samples
STEPS = 6
GRIDS = 24  # of each side and number of steps, and of blanks; twice as many of merged panels


def _unfinished(flux: Path, seed: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Grids, float (2S, 2S, 3) in [0, 1], whose denoising the toy FLUX ends after two, three or four of ``STEPS`` steps."""
    import torch
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(flux, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generator, grids = torch.Generator().manual_seed(seed), []
    for size, last in itertools.product(SIDES, (1, 2, 3)):

        def end(pipe: FluxPipeline, step: int, timestep: object, tensors: dict, last: int = last) -> dict:
            pipe._interrupt = step >= last  # diffusers' way to stop a pipeline
            return tensors

        characters = rng.integers(len(CHARACTERS), size=GRIDS)
        prompts = [grid_prompt(CHARACTERS[c], [VIEWS[v] for v in rng.permutation(len(VIEWS))[:4]]) for c in characters]
        grids += list(pipe(prompts, height=size, width=size, num_inference_steps=STEPS, guidance_scale=3.5, generator=generator,
                           callback_on_step_end=end, max_sequence_length=pipe.tokenizer_2.model_max_length,
                           output_type="np").images)  # fmt: skip
    return grids


def _blank(side: int, rng: np.random.Generator) -> np.ndarray:
    """A panel in one color, mostly white."""
    return np.ones((side, side, 3)) * (1.0 if rng.random() < 0.6 else rng.random(3))


def _merged(side: int, rng: np.random.Generator) -> np.ndarray:
    """Two panels of different characters on top of each other."""
    two = [CHARACTERS[c] for c in rng.choice(len(CHARACTERS), size=2, replace=False)]
    panels = [render_panel(c, VIEWS[rng.integers(len(VIEWS))], side, random_jitter(rng)) for c in two]
    return np.minimum(*panels) if rng.random() < 0.5 else sum(panels) / 2


def broken_panels(flux: Path, seed: int) -> list[Image.Image]:
    """Panels that the oracle calls invalid; neighbors in the list are mostly of one kind and one grid."""
    rng = np.random.default_rng([seed, 40])
    grids = _unfinished(flux, seed, rng)
    for make in (_blank, _merged, _merged):
        for number in range(GRIDS):
            side = (16, 32, 64)[number % 3]
            panels = [make(side, rng) for _ in range(4)]
            grids.append(assemble_grid(panels) + rng.normal(scale=rng.uniform(0, 0.08), size=(2 * side, 2 * side, 3)))
    images = [Image.fromarray(to_uint8(grid)) for grid in grids]
    found = []
    for image, valid in zip(images, read_grids(images).valid, strict=True):
        side = image.width // 2
        corners = [(x, y, x + side, y + side) for y in (0, side) for x in (0, side)]
        found += [image.crop(corner) for corner, fine in zip(corners, valid, strict=True) if not fine]
    return found
