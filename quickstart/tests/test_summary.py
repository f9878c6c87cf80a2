"""summary.json's numbers, and the page."""

import json

import numpy as np
import pytest

from paco_toy import report
from paco_toy.summary import policy_measures, table
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


def test_the_change_of_edits_is_paired(tmp_path):
    before = [0.0, 0.0, 1.0, 0.5]
    after = [1.0, 0.0, 1.0, 1.0]
    for epoch, scores in ((0, before), (7, [0.0] * 4), (12, after)):
        rewards = []
        for score in scores:
            rewards.append({"oracle_edit": score, "oracle_followed": score, "oracle_kept": 1.0})
        write_evaluation(tmp_path, epoch, rewards)
    measures = policy_measures(tmp_path)
    assert measures["before"]["oracle_edit"] == 0.375
    assert measures["after"]["oracle_edit"] == 0.75
    assert measures["epochs"] == 12
    stderr = np.subtract(after, before).std(ddof=1) / 2
    assert measures["change"]["oracle_edit"] == pytest.approx({"mean": 0.375, "stderr": stderr})
    assert "+0.375 ±0.239" in table({"policy": measures, "minutes": 8})
    stopped = measures | {"planned_epochs": 13}
    assert "12 of 13" in table({"policy": stopped, "minutes": 8})


def test_the_page_explains_judge_and_oracle(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    lines = []
    for epoch, score in ((0, 0.25), (9, 0.75)):
        rewards = {"consistency_score": score, "oracle_consistency": score / 2}
        write_grids(run, epoch, rewards, [CHARACTERS[0], CHARACTERS[3]], [[0, 0, 1, 1], [3] * 4])
        metrics = {f"eval/{name}_mean": value for name, value in rewards.items()}
        lines.append({"phase": "eval", "epoch": epoch} | metrics)
    lines.append({"phase": "train", "epoch": 9, "reward/consistency_score_mean": 0.5})
    write_jsonl(run / "metrics.jsonl", lines)
    (run / "config.yaml").write_text("num_epochs: 12\n")
    judges = {"base": {"accuracy": 0.51, "auc": 0.52}, "lora": {"accuracy": 0.97, "auc": 0.98}}
    summary = {"stage_seconds": {"world": 60, "rl": 120}, "judge": judges}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path), "run", "A title"])
    report.main()
    page = (tmp_path / "report.html").read_text()
    for part in (
        "9 of 12 epochs",
        "3.0 minutes (world 1.0, rl 2.0)",
        "<tr><th>accuracy</th><td>0.510</td><td>0.970</td></tr>",
        "oracle: consistency 0.12 → 0.38",
    ):
        assert part in page
