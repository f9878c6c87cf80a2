"""The numbers of summary.json."""

import json

import numpy as np
import pytest

from paco_toy.summary import judge_measures, policy_measures
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    grid_prompt,
    opened,
    render_grid,
    to_image,
    write_jsonl,
)

NAMED = [
    CHARACTERS[0],
    CHARACTERS[0],
    opened(CHARACTERS[0], ("style", "colour")),
    opened(CHARACTERS[5], ("colour",)),
]
# Epoch -> the characters of each image's panels
SHOWN = {
    0: [[0, 0, 1, 1], [0, 1, 2, 3], [0, 5, 10, 15], [5, 5, 0, 0]],
    1: [[0, 0, 2, 1], [3, 1, 2, 0], [5, 5, 10, 0], [5, 0, 0, 0]],
    2: [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 10, 10], [10, 10, 10, 10]],
}


def test_measures_are_of_the_prompts_that_they_apply_to(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "train: {resolution: 64}\ntest: {resolution: 128}\nnum_epochs: 12\n"
    )
    for epoch, characters in SHOWN.items():
        folder = tmp_path / "eval" / f"epoch_{epoch:04d}"
        folder.mkdir(parents=True)
        rows = []
        for number, panels in enumerate(characters):
            grid = render_grid([CHARACTERS[panel] for panel in panels], VIEWS[:4], 32)
            to_image(grid).save(folder / f"{number}.png")
            prompt = grid_prompt(NAMED[number], VIEWS[:4])
            rewards = {"consistency_score": 0.4 + epoch / 10}
            rows.append({"prompt": prompt, "rewards": rewards, "file": f"{number}.png"})
        write_jsonl(folder / "eval_data.jsonl", rows)
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
    sizes = [measures[name] for name in ("epochs", "train_resolution", "test_resolution")]
    assert sizes == [2, 64, 128]


def test_measures_of_the_judges_and_of_the_benchmark(tmp_path):
    for number, name in enumerate(("judge", "histogram")):
        rows = [{"metrics": {"top1": number + place, name: 1.0}} for place in (0.25, 0.75)]
        write_jsonl(tmp_path / "rank_results" / f"{name}.jsonl", rows)
    judges = {"base": {"accuracy": 0.5}, "lora": {"accuracy": 0.75}}
    for name, report in judges.items():
        (tmp_path / f"judge_{name}.json").write_text(json.dumps(report))
    measures = judge_measures(tmp_path)
    assert measures["judge"] == judges
    histogram = measures["rank"].pop("histogram")
    assert measures["rank"] == {"top1": 0.5, "judge": 1.0, "items": 2}
    assert histogram == {"top1": 1.5, "histogram": 1.0, "items": 2}
