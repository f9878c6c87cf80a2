"""VCReward-Bench: accuracy by hand, both ways of asking, winners, broken rows.

Forms of a data set: test_edit_bench.py.
"""

import json

import numpy as np
import pytest
from bench_tools import EVALUATION, BenchCommand, BrightnessJudge, brightness, edit_lines

from paco_eval import vc as vc_reward
from paco_judge.verdict import Verdict

TASKS = ("subject_add", "cref")


@pytest.fixture
def bench(tiny, tmp_path):
    """``evaluation.py`` on eight rows, whose winners are 0 and 1 in turn.

    ``bench.light``: brightness of the source and both edits of each row.
    """
    rows = []
    light = []
    for index in range(8):
        files = [f"{index}{name}.png" for name in "sab"]
        pictures = [tiny.picture(10 * index + i) for i in range(3)]
        for file, picture in zip(files, pictures, strict=True):
            picture.save(tmp_path / file)
        light.append([brightness(picture) for picture in pictures])
        row = {
            "key": f"k{index}",
            "instruction": "make it red",
            "winner": str(index % 2),
            "task": TASKS[index // 4],
            "source_image": files[0],
            "edited_images": files[1:],
        }
        rows.append(json.dumps(row))
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows) + "\n")
    arguments = ["--dataset", data, "--results_dir", tmp_path / "results"]
    arguments += ["--output", tmp_path / "table"]
    command = BenchCommand(vc_reward, data, tmp_path, arguments, "judge")
    command.light = light
    return command


def test_the_edit_with_the_higher_score_wins(bench, tmp_path):
    judge = BrightnessJudge()
    assert bench(judge) == 0
    assert len(judge.questions) == 16 and "make it red" in judge.questions[0]
    assert [row["winner"] for row in bench.rows] == [0, 1] * 4
    head, line = (tmp_path / "table.txt").read_text().splitlines()
    cells = dict(zip(head.split(), line.split(), strict=True))
    assert cells["pairs"] == "8"
    assert cells["ties"] == "0"
    # An answer is right where the edit nearer in brightness to its source is the winner.
    source, first, second = np.transpose(bench.light)
    nearer = np.where(abs(source - first) < abs(source - second), 0, 1)
    hits = nearer == [0, 1] * 4
    assert float(cells[TASKS[0]]) == pytest.approx(hits[:4].mean(), abs=1e-4)
    assert float(cells[TASKS[1]]) == pytest.approx(hits[4:].mean(), abs=1e-4)
    assert float(cells["average"]) == pytest.approx(hits.mean(), abs=1e-4)


def test_a_judge_that_compares_is_asked_in_both_orders(bench, tmp_path):
    class Comparing(BrightnessJudge):
        def score(self, pair):
            return float(brightness(pair.image_b) > brightness(pair.more_images[0]))

    file = tmp_path / "mine.txt"
    file.write_text("Edit: {instruction}. Is the first edit better?")
    judge = Comparing()
    assert bench(judge, "--compare", file) == 0
    bench.file = bench.file.with_name("judge-vmine.jsonl")
    assert set(judge.questions) == {"Edit: make it red. Is the first edit better?"}
    for row in bench.rows:
        assert sorted(row["scores"]) == [0.0, 1.0]
        assert row["asked"]["compares"]


def test_ties_are_wrong_and_rows_without_a_winner_are_counted(bench, capsys, monkeypatch):
    edit_lines(bench.data, {1: lambda row: row | {"winner": "left"}})
    assert bench(lambda pairs: [Verdict(0.5)] * len(pairs)) == 1
    output = capsys.readouterr()
    assert "item 1 k1: winner" in output.err and "1 items have no result" in output.err
    assert output.out.splitlines()[-1].split()[-1] == "7" and "0.0000" in output.out
    bench.data.write_text("")
    assert bench(BrightnessJudge()) == 2
    monkeypatch.chdir(EVALUATION / "VCReward-Bench")  # our code's folder is not the data set
    assert bench.main("--dataset", "") == 2
    assert f"dataset {vc_reward.HUB_NAME} cannot" in capsys.readouterr().err


def test_winners():
    assert [vc_reward.winner_index(value, False) for value in (0, "1", "A", "b")] == [0, 1, 0, 1]
    assert [vc_reward.winner_index(value, True) for value in (1, "2")] == [0, 1]
