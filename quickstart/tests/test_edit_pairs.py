"""The data of the judge of edits: its answers are what the oracle measures on the images."""

import json

import numpy as np
import pytest
from PIL import Image

from paco_toy import edit_pairs
from paco_toy.edit_oracle import judge_edits
from paco_toy.edits import random_edit
from paco_toy.world import assemble_grid, render_panel, split_characters, to_uint8


@pytest.mark.parametrize("outcome", edit_pairs.OUTCOMES)
def test_answers_are_what_the_oracle_measures(outcome):
    rng, (known, held_out) = np.random.default_rng(3), split_characters()
    edits = [random_edit(rng, known, held_out if number % 2 else known) for number in range(24)]
    made = [edit_pairs.attempt(edit, outcome, rng) for edit in edits]
    images = []
    for panels in made:
        drawn = [np.ones((64, 64, 3)) if p.broken else render_panel(p.character, p.view, 64) for p in panels]
        images.append(Image.fromarray(to_uint8(assemble_grid(drawn))))
    followed, kept = judge_edits(images, edits)
    answers = [edit_pairs.answers(edit, panels) for edit, panels in zip(edits, made, strict=True)]
    assert [a["editing_instruction"].startswith("Yes") for a in answers] == list(followed == 1)
    assert [a["editing_consistency"].startswith("Yes") for a in answers] == list(kept == 1)
    assert (followed == 1).all() if outcome in ("right", "one more panel", "moved") else (followed == 0).any()


def test_data_sets(tmp_path):
    edit_pairs.write(tmp_path, 0, {"train": 12, "test": 6})
    sets = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in json.loads((tmp_path / "dataset_info.json").read_text())}
    assert {name: len(rows) for name, rows in sets.items()} == {edit_pairs.TRAIN: 24} | dict.fromkeys(edit_pairs.TESTS.values(), 6)
    for row in sets[edit_pairs.TRAIN]:
        sizes = []
        for name in row["images"]:
            with Image.open(tmp_path / name) as image:
                sizes.append(image.size)
        assert sizes[0] == (128, 128) and sizes[1] in ((64, 64), (128, 128))
        assert row["messages"][1]["content"].split(".")[0] in ("Yes", "No")
