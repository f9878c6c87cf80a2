"""Our prompt set, dataset/T2IS: varied and well formed."""

from pathlib import Path

from paco_grpo.data.prompts import load_prompts
from paco_judge.grid import split_prompt
from paco_judge.questions import load_question

FOLDER = Path(__file__).resolve().parents[2] / "dataset" / "T2IS"
CELL = 512  # pixels, square


def test_items_are_varied_complete_and_share_no_theme():
    everything = []
    for split in ("train", "test"):
        items = load_prompts(FOLDER, split)
        kinds = {(item.metadata["category"], item.metadata["layout"]) for item in items}
        assert len(kinds) == 5 * 3 and {layout for _, layout in kinds} == {"1x3", "2x2", "2x3"}
        assert len({item.metadata["category"] for item in items[:5]}) == 5  # what a short evaluation sees
        everything += items
    for item in everything:
        grid = split_prompt(item.prompt)
        assert (item.height, item.width) == (CELL * grid.rows, CELL * grid.cols)
        assert set(load_question("criteria").texts(item.metadata["criteria"])) == {"Style", "Logic", "Identity"}
    themes = [" ".join(item.metadata["theme"].lower().split()) for item in everything]
    assert len({item.metadata["idx"] for item in everything}) == len(set(themes)) == len(everything)
