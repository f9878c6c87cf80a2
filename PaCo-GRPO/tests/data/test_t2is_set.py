"""Our prompt set, dataset/T2IS: enough items, varied, well formed, and no two similar."""

import re
from collections import Counter
from itertools import combinations
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
# Shares of common word trigrams: items written independently have far less, a filled template far more.
SIMILAR_PROMPTS, SIMILAR_THEMES = 0.12, 0.3
FORM = re.compile(r"(THREE|FOUR|SIX)-PANEL Images with a \dx\d grid layout|\[[A-Z]+\](-\[[A-Z]+\])?:")


@pytest.fixture(scope="module")
def items():
    return {split: load_prompts(FOLDER, split) for split in LEAST}


def trigrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[\w'-]+", FORM.sub(" ", text).lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def overlap(a: set, b: set) -> float:
    return len(a & b) / max(1, min(len(a), len(b)))


def test_enough_of_every_kind(items):
    for split, least in LEAST.items():
        assert len(items[split]) >= least
        kinds = Counter((item.metadata["category"], item.metadata["layout"]) for item in items[split])
        assert set(kinds) == {(category, layout) for category in CATEGORIES for layout in LAYOUTS}
        assert min(kinds.values()) >= 3
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
        # what a CLIP text encoder sees of a panel (77 tokens), and T5 of a prompt (512)
        assert all(4 <= len(panel.split()) <= 45 for panel in grid.panels), item.metadata["idx"]
        assert len(item.prompt.split()) <= 260
        assert len(set(grid.panels)) == len(grid.panels)


def test_no_two_items_are_similar(items):
    everything = [*items["train"], *items["test"]]
    found = []
    for key, text_of, limit in (
        ("prompt", lambda item: item.prompt, SIMILAR_PROMPTS),
        ("request", lambda item: item.metadata["theme"], SIMILAR_THEMES),
        ("theme", lambda item: split_prompt(item.prompt).theme, SIMILAR_PROMPTS),
        ("criteria", lambda item: str(list(item.metadata["criteria"].values())), SIMILAR_THEMES),
    ):
        grams = [(item.metadata["idx"], trigrams(text_of(item))) for item in everything]
        found += [
            (key, a, b, round(overlap(x, y), 2)) for (a, x), (b, y) in combinations(grams, 2) if overlap(x, y) > limit
        ]
    assert not found, "\n".join(map(str, found))


def test_train_and_test_share_no_theme(items):
    for theme_of in (lambda item: split_prompt(item.prompt).theme, lambda item: item.metadata["theme"]):
        themes = [" ".join(theme_of(item).lower().split()) for item in [*items["train"], *items["test"]]]
        assert len(set(themes)) == len(themes)
