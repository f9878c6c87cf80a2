"""What an editor draws, measured by the oracle through diffusers' own pipeline; and pictures of it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from PIL import Image, ImageDraw

from paco_toy.edit_oracle import judge_edits
from paco_toy.edits import Edit, draw_scene, random_edit
from paco_toy.oracle import read_grids
from paco_toy.world import CHARACTERS, random_jitter


def _edits(count: int, seed: int) -> tuple[list[Edit], list[list[tuple[float, float]]]]:
    rng = np.random.default_rng([seed, 41])
    everything = range(len(CHARACTERS))
    return (
        [random_edit(rng, everything, everything) for _ in range(count)],
        [[random_jitter(rng) for _ in range(4)] for _ in range(count)],
    )


def draw_edits_of(module: ModuleType, pipe, edits, jitters, size: int, seed: int, steps: int) -> tuple[list, list]:
    """(reference images, edited images) of ``size`` pixels; an image's noise depends on its place in the list alone."""
    references = [draw_scene(e.characters, e.views, size, j) for e, j in zip(edits, jitters, strict=True)]
    images = []
    for start in range(0, len(edits), 32):
        batch = slice(start, start + 32)
        seeds = [seed * 100003 + start + i for i in range(len(edits[batch]))]
        images += module.draw(pipe, references[batch], [e.instruction for e in edits[batch]], seeds, steps)
    return references, images


def editor_quality(
    module: ModuleType, pipe, seed: int, count: int = 192, sizes: tuple[int, ...] = (64, 128), steps: int = 10
) -> dict:
    """Oracle means for ``count`` edits over all characters: {"64px": {"edit": …, "followed": …, …}, …}.

    edit = sqrt(followed · kept); valid = share of valid panels.

    Args:
        module: of the editor, see `paco_toy.build_editors.EDITORS`.
        pipe: its loaded pipeline.
    """
    pipe.set_progress_bar_config(disable=True)
    edits, jitters = _edits(count, seed)
    quality = {}
    for size in sizes:
        _, images = draw_edits_of(module, pipe, edits, jitters, size, seed, steps)
        followed, kept = judge_edits(images, edits)
        quality[f"{size}px"] = {
            "edit": float(np.sqrt(followed * kept).mean()),
            "followed": float(followed.mean()),
            "kept": float(kept.mean()),
            "valid": float(read_grids(images).valid.mean()),
        }
    return quality


def contact_sheet(module: ModuleType, pipe, seed: int, count: int = 12, size: int = 128, steps: int = 10) -> Image.Image:
    """Pairs of reference and edited image with the instruction above, three pairs a row."""
    pipe.set_progress_bar_config(disable=True)
    edits, jitters = _edits(count, seed + 1)
    references, images = draw_edits_of(module, pipe, edits, jitters, size, seed + 1, steps)
    cell, columns = (2 * size + 24, size + 28), 3
    sheet = Image.new("RGB", (columns * cell[0], -(-count // columns) * cell[1]), (226, 226, 230))
    pen = ImageDraw.Draw(sheet)
    for i, edit in enumerate(edits):
        x, y = i % columns * cell[0] + 8, i // columns * cell[1]
        pen.text((x, y + 6), edit.instruction, fill=(20, 20, 20))
        sheet.paste(references[i], (x, y + 22))
        sheet.paste(images[i], (x + size + 6, y + 22))
    return sheet
