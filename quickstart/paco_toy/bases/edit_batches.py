"""Training edits for the toy editors: scenes, instructions, and targets that honestly depart from what is asked.

A target departs with probability `DEPARTURE`, so that a base learns to draw well and to keep what it sees, and *not* to do
reliably as it is told: that is left to RL.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paco_toy.bases.panels import PanelCache
from paco_toy.world import COLOURS, SHAPES, STYLES, VIEWS

DEPARTURE = 0.35
# How it departs: nothing changes; the panel gets another value than asked; another panel gets the value; another panel
# changes as well. The last one still follows the instruction.
KINDS = {"untouched": 0.35, "other value": 0.30, "other panel": 0.15, "one more": 0.20}
VALUES = (*COLOURS, *STYLES)  # what an instruction can ask for


@dataclass(frozen=True)
class EditBatch:
    """B edits. Panels are row-major; characters and views are indices into CHARACTERS and VIEWS."""

    before: np.ndarray  # int (B, 4), characters of the reference image
    after: np.ndarray  # int (B, 4), characters of the target
    views: np.ndarray  # int (B, 4), of both
    variants: np.ndarray  # int (B, 4) in {0, 1}, of both: what stays is the same to the last pixel
    place: np.ndarray  # int (B,), the panel that the instruction names
    value: np.ndarray  # int (B,), index into VALUES
    instructions: list[str]


def draw_edits(count: int, rng: np.random.Generator, departure: float = DEPARTURE) -> EditBatch:
    """Random edits of scenes of four different shapes, over all characters."""
    shape = rng.random((count, len(SHAPES))).argsort(axis=1)[:, :4]
    looks = np.stack([rng.integers(len(COLOURS), size=(count, 4)), rng.integers(len(STYLES), size=(count, 4))])
    place, attribute = rng.integers(4, size=count), rng.integers(2, size=count)
    row = np.arange(count)
    asked = _other(looks[attribute, row, place], attribute, rng)
    kind = rng.choice(list(KINDS), p=list(KINDS.values()), size=count)
    kind[rng.random(count) >= departure] = "followed"
    after = looks.copy()
    elsewhere = (place + rng.integers(1, 4, size=count)) % 4
    for b in range(count):
        a, p, e = attribute[b], place[b], elsewhere[b]
        if kind[b] in ("followed", "one more"):
            after[a, b, p] = asked[b]
        if kind[b] == "other value":
            choices = [v for v in range((len(COLOURS), len(STYLES))[a]) if v not in (asked[b], looks[a, b, p])]
            after[a, b, p] = rng.choice(choices)
        if kind[b] == "other panel":
            after[a, b, e] = asked[b]
        if kind[b] == "one more":
            after[a, b, e] = _other(looks[a, b, e], a, rng)
    value = asked + len(COLOURS) * attribute
    words = [f"make the {SHAPES[shape[b, place[b]]]} {VALUES[value[b]]}" for b in range(count)]
    views = rng.integers(len(VIEWS), size=(count, 4))
    variants = rng.integers(2, size=(count, 4))
    return EditBatch(_characters(shape, looks), _characters(shape, after), views, variants, place, value, words)


def draw_pixels(batch: EditBatch, panels: PanelCache) -> tuple[np.ndarray, np.ndarray]:
    """Reference and target images, uint8 (B, 2S, 2S, 3) each; a panel that stays is the same in both."""
    return tuple(panels.assemble(panels.pixels[kind, batch.views, batch.variants]) for kind in (batch.before, batch.after))


def _characters(shape: np.ndarray, looks: np.ndarray) -> np.ndarray:
    colour, style = looks
    return style * len(COLOURS) * len(SHAPES) + colour * len(SHAPES) + shape


def _other(value: np.ndarray, attribute: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another value of the attribute (0 colour, 1 style), uniformly."""
    count = np.where(attribute == 0, len(COLOURS), len(STYLES))
    return (value + 1 + np.floor(rng.random(np.shape(value)) * (count - 1)).astype(int)) % count
