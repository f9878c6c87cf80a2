"""The numbers of summary.json."""

import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from paco_grpo.report.run import Pair
from paco_judge.files import write_json_lines
from paco_toy import report, summary
from paco_toy.summary import judge_measures, policy_measures, table
from paco_toy.world import (
    CHARACTERS,
    VIEWS,
    grid_prompt,
    opened,
    render_grid,
    to_image,
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
        write_json_lines(folder / "eval_data.jsonl", rows)
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
    lines = table({"policy": measures, "minutes": 3.0}).splitlines()
    (line,) = [line for line in lines if "agreement" in line]
    assert line.split()[-4:] == ["0.167", "0.667", "+0.500", "±0.167"]


def test_measures_of_the_judges_and_of_the_benchmark(tmp_path):
    for number, name in enumerate(("judge", "histogram")):
        rows = [{"metrics": {"top1": number + place, name: 1.0}} for place in (0.25, 0.75)]
        write_json_lines(tmp_path / "rank_results" / f"{name}.jsonl", rows)
    judges = {"base": {"accuracy": 0.5, "auc": None}, "lora": {"accuracy": 0.75, "auc": 0.8}}
    for name, numbers in judges.items():
        (tmp_path / f"judge_{name}.json").write_text(json.dumps(numbers))
    measures = judge_measures(tmp_path)
    assert measures["judge"] == judges
    rows = report.judge_accuracy(judges)["rows"]
    assert rows == [["accuracy", "0.500", "0.750"], ["AUC", "–", "0.800"]]
    histogram = measures["rank"].pop("histogram")
    assert measures["rank"] == {"top1": 0.5, "judge": 1.0, "items": 2}
    assert histogram == {"top1": 1.5, "histogram": 1.0, "items": 2}


def test_a_commit_with_changes_is_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "REPO", tmp_path)
    assert summary.commit() == "unknown"
    results = tmp_path / "quickstart" / "results.csv"
    results.parent.mkdir()
    for file in (results, tmp_path / "code.py"):
        file.write_text("first")
    subprocess.run(
        "git init -q && git add . && git -c user.name=n -c user.email=e commit -qm first",
        cwd=tmp_path,
        shell=True,
        check=True,
    )
    clean = summary.commit()
    results.write_text("another row")
    assert summary.commit() == clean
    seen = [clean]
    for code in ("second", "third"):
        (tmp_path / "code.py").write_text(code)
        seen.append(summary.commit())
    assert len(set(seen)) == 3
    assert all(commit.startswith(f"{clean}+") for commit in seen[1:])


def test_each_image_is_a_point_of_oracle_and_judge(monkeypatch):
    monkeypatch.setattr(report, "svg_url", lambda figure: figure)
    points = {"before": (0.25, 0.5), "after": (0.75, 0.125)}
    rows = []
    for oracle, judge in points.values():
        rows.append({"rewards": {"consistency_score": judge, "oracle_consistency": oracle}})
    names = dict.fromkeys(rows[0]["rewards"])
    run = SimpleNamespace(train={"consistency_score": None}, test=names, pairs=[Pair(*rows)])
    (axes,) = report.judge_and_oracle(run)["image"].axes
    assert "oracle" in axes.get_xlabel() and "oracle" not in axes.get_ylabel()
    for (when, point), shown in zip(points.items(), axes.collections, strict=True):
        assert shown.get_label().startswith(when)
        assert shown.get_offsets().tolist() == [list(point)]
