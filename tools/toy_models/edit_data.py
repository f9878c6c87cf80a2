"""Training edits for the toy editors: scenes, instructions, and targets that sometimes depart from the instruction.

A target departs with a given probability. A base editor thus learns to draw well and to keep what it sees, but does not
follow instructions reliably: that is left to RL.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paco_toy.world import COLOURS, SHAPES, STYLES, VIEWS

DEPARTURE = 0.35
# How a target departs: nothing changes; the panel gets another value; another panel gets the value; a second panel changes
# as well. The last one still follows the instruction.
KINDS = {"untouched": 0.35, "other value": 0.30, "other panel": 0.15, "one more": 0.20}
VALUES = (*COLOURS, *STYLES)
INSTRUCTIONS = [f"make the {shape} {value}" for shape in SHAPES for value in VALUES]


@dataclass(frozen=True)
class EditBatch:
    """B edits. Panels are row-major; characters and views are indices into CHARACTERS and VIEWS."""

    before: np.ndarray  # int (B, 4), characters of the reference image
    after: np.ndarray  # int (B, 4), characters of the target
    views: np.ndarray  # int (B, 4), of both
    variants: np.ndarray  # int (B, 4) in {0, 1}, of both: an unchanged panel is the same to the last pixel
    place: np.ndarray  # int (B,), the panel that the instruction names
    value: np.ndarray  # int (B,), index into VALUES
    instructions: list[str]


def sample_edits(count: int, rng: np.random.Generator, departure: float = DEPARTURE) -> EditBatch:
    """Random edits of scenes of four different shapes, over all characters."""
    shape = rng.random((count, len(SHAPES))).argsort(axis=1)[:, :4]
    looks = np.stack([rng.integers(len(COLOURS), size=(count, 4)), rng.integers(len(STYLES), size=(count, 4))])
    place, attribute = rng.integers(4, size=count), rng.integers(2, size=count)
    asked = _other(looks[attribute, np.arange(count), place], attribute, rng)
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
    words = [INSTRUCTIONS[shape[b, place[b]] * len(VALUES) + value[b]] for b in range(count)]
    views = rng.integers(len(VIEWS), size=(count, 4))
    variants = rng.integers(2, size=(count, 4))
    return EditBatch(_characters(shape, looks), _characters(shape, after), views, variants, place, value, words)


def panel_tokens(values: np.ndarray, side: int) -> torch.Tensor:
    """Values of panels (B, 4), row-major, repeated for their tokens: (B, 4·P²) for panels of P x P tokens (``side``)."""
    grid = torch.from_numpy(values).unflatten(1, (2, 2))
    return grid.repeat_interleave(side, 1).repeat_interleave(side, 2).flatten(1)


def asked_tokens(place: np.ndarray, side: int) -> torch.Tensor:
    """1 for tokens of the panels (B,) that the instructions name, else 0: float (B, 4·P²)."""
    return panel_tokens(np.eye(4, dtype=np.float32)[place], side)


def _characters(shape: np.ndarray, looks: np.ndarray) -> np.ndarray:
    colour, style = looks
    return style * len(COLOURS) * len(SHAPES) + colour * len(SHAPES) + shape


def _other(value: np.ndarray, attribute: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Another value of the attribute (0 colour, 1 style), uniformly."""
    count = np.where(attribute == 0, len(COLOURS), len(STYLES))
    return (value + 1 + np.floor(rng.random(np.shape(value)) * (count - 1)).astype(int)) % count
