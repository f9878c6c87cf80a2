"""Our prompt set, dataset/T2IS: enough items, varied and well formed."""

from collections import Counter
from pathlib import Path

import pytest

from paco_grpo.data.prompts import load_prompts
from paco_judge.grid import split_prompt
from paco_judge.questions import load_question

FOLDER = Path(__file__).resolve().parents[2] / "dataset" / "T2IS"
CELL = 512  # every cell of the stated shape is square
LEAST = {"train": 150, "test": 60}
LAYOUTS = {"1x3", "2x2", "2x3"}
CATEGORIES = {"Character Identity", "Story Sequence", "Style Series", "Process Steps", "Object Views"}

@pytest.fixture(scope="module")
def items():
    return {split: load_prompts(FOLDER, split) for split in LEAST}


def test_enough_of_every_kind(items):
    for split, least in LEAST.items():
        assert len(items[split]) >= least
        kinds = Counter((item.metadata["category"], item.metadata["layout"]) for item in items[split])
        assert set(kinds) == {(category, layout) for category in CATEGORIES for layout in LAYOUTS}
        # the first items of a split are what a short evaluation sees
        assert {item.metadata["category"] for item in items[split][:5]} == CATEGORIES


def test_every_item_is_complete(items):
    everything = [*items["train"], *items["test"]]
    names = [item.metadata["idx"] for item in everything]
    assert len(set(names)) == len(names)
    for item in everything:
        grid = split_prompt(item.prompt)
        assert (item.height, item.width) == (CELL * grid.rows, CELL * grid.cols)
        assert item.metadata["layout"] == f"{grid.rows}x{grid.cols}"
        assert item.metadata["theme"].endswith((".", "?")) and item.metadata["task_name"]
        assert {name.lower() for name in item.metadata["criteria"]} == {"style", "logic", "identity"}
        assert set(load_question("criteria").texts(item.metadata["criteria"])) == set(item.metadata["criteria"])
        assert len(set(grid.panels)) == len(grid.panels)


def test_train_and_test_share_no_theme(items):
    for theme_of in (lambda item: split_prompt(item.prompt).theme, lambda item: item.metadata["theme"]):
        themes = [" ".join(theme_of(item).lower().split()) for item in [*items["train"], *items["test"]]]
        assert len(set(themes)) == len(themes)
