"""summary.json's numbers, and the page."""

import numpy as np
import pytest

from paco_toy.summary import policy_measures
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    grid_prompt,
    opened,
    render_grid,
    to_image,
    write_jsonl,
)


def write_evaluation(run, epoch, rewards):
    """An evaluation; returns its folder and rows."""
    (run / "config.yaml").write_text(
        "train: {resolution: 64}\ntest: {resolution: 128}\nnum_epochs: 12\n"
    )
    folder = run / "eval" / f"epoch_{epoch:04d}"
    folder.mkdir(parents=True)
    rows = []
    for number, scores in enumerate(rewards):
        rows.append({"prompt": "p", "rewards": scores, "file": f"{number}.png"})
    write_jsonl(folder / "eval_data.jsonl", rows)
    return folder, rows


def write_grids(run, epoch, reward, named, shown):
    """An evaluation with images: the characters that prompts name, and those of their panels."""
    folder, rows = write_evaluation(run, epoch, [reward] * len(named))
    for row, character, panels in zip(rows, named, shown, strict=True):
        grid = render_grid([CHARACTERS[number] for number in panels], VIEWS[:4], 32)
        to_image(grid).save(folder / row["file"])
        row["prompt"] = grid_prompt(character, VIEWS[:4])
    write_jsonl(folder / "eval_data.jsonl", rows)


def test_measures_are_of_the_prompts_that_they_apply_to(tmp_path):
    named = [
        CHARACTERS[0],
        CHARACTERS[0],
        opened(CHARACTERS[0], ("style", "colour")),
        opened(CHARACTERS[5], ("colour",)),
    ]
    shown = {
        0: [[0, 0, 1, 1], [0, 1, 2, 3], [0, 5, 10, 15], [5, 5, 0, 0]],
        2: [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 10, 10], [10, 10, 10, 10]],
    }
    for epoch, characters in shown.items():
        write_grids(tmp_path, epoch, {"consistency_score": 0.4 + epoch / 10}, named, characters)
    measures = policy_measures(tmp_path)
    before = measures["before"]
    after = measures["after"]
    change = measures["change"]
    assert before["consistency"] == pytest.approx(1 / 6)
    assert after["consistency"] == pytest.approx(3 / 4)
    assert before["agreement"] == pytest.approx((0 + 2 / 6) / 2)
    assert after["agreement"] == pytest.approx((2 / 6 + 1) / 2)
    differences = np.array([2 / 6, 4 / 6])
    stderr = differences.std(ddof=1) / 2**0.5
    assert change["agreement"] == pytest.approx({"mean": differences.mean(), "stderr": stderr})
    assert change["choice"]["stderr"] > 0
    assert change["reward"]["mean"] == pytest.approx(0.2)
    assert measures["epochs"] == 2
    assert measures["num_images"] == 4
    assert measures["train_resolution"] == 64
    assert measures["test_resolution"] == 128
