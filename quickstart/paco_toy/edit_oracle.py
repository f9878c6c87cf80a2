"""The oracle of the editing task, by pixel statistics alone: was the instruction followed, and was the rest kept?

*Followed*, 0 or 1: the changed panel is valid and shows its shape with the new colour or style. *Kept*: the share of eight
facts that stayed: character and view of the three other panels, and of the changed one its view and its other attribute. An
untouched copy has 0 and 1, an unrelated picture about 0 and 0. The score of an edit is sqrt(followed · kept), as
docs/method.md §1 joins the judge's two answers.

The factories at the end are rewards for PaCo-GRPO, given by import path (`paco_toy.edit_oracle:oracle_edit`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from paco_toy.edits import EDITABLE, Edit, read_edit
from paco_toy.oracle import Reading, Scorer, read_grids
from paco_toy.world import CHARACTERS, VIEW_INDEX


def judge_edits(images: Sequence[Image.Image], edits: Sequence[Edit]) -> tuple[np.ndarray, np.ndarray]:
    """Followed and kept, float64 (B,) in [0, 1] each, of 2x2 grids of any square size from 32 px on."""
    reading = read_grids(images)
    pairs = [_judge(reading, b, edit) for b, edit in enumerate(edits)]
    followed, kept = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return followed, kept


def _judge(reading: Reading, b: int, edit: Edit) -> tuple[bool, float]:
    followed, facts = False, []
    for panel in range(4):
        valid = bool(reading.valid[b, panel])
        shown = CHARACTERS[reading.character[b, panel]]
        facts.append(valid and reading.view[b, panel] == VIEW_INDEX[edit.views[panel]])
        if panel == edit.place:
            (other,) = set(EDITABLE) - {edit.attribute}
            facts.append(valid and getattr(shown, other) == getattr(edit.result, other))
            followed = valid and shown.shape == edit.result.shape and getattr(shown, edit.attribute) == edit.value
        else:
            facts.append(valid and shown == edit.characters[panel])
    return followed, float(np.mean(facts))


def _scores(images: Sequence[Image.Image], items: Sequence) -> tuple[np.ndarray, np.ndarray]:
    return judge_edits(images, [read_edit(item.metadata) for item in items])


def oracle_followed() -> Scorer:
    """Reward factory: was the instruction followed, float64 (B,), 0 or 1."""
    return lambda images, items: _scores(images, items)[0]


def oracle_kept() -> Scorer:
    """Reward factory: share of the rest that stayed, float64 (B,)."""
    return lambda images, items: _scores(images, items)[1]


def oracle_edit() -> Scorer:
    """Reward factory: sqrt(followed · kept), float64 (B,)."""
    return lambda images, items: np.sqrt(np.prod(_scores(images, items), axis=0))
