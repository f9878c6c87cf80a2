"""VCReward-Bench: accuracy by hand, both ways of asking, winners, broken rows."""

import importlib.util
import itertools
import json

import datasets
import pytest
from bench_tools import EVALUATION, BenchCommand, BrightnessJudge, brightness

from paco_judge.verdict import Verdict

spec = importlib.util.spec_from_file_location("vc_reward", EVALUATION / "VCReward-Bench" / "evaluation.py")
vc_reward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(vc_reward)


@pytest.fixture
def pictures(tiny):
    """Source and two edits of eight rows."""
    return [[tiny.picture(10 * row + i) for i in range(3)] for row in range(8)]


@pytest.fixture
def bench(pictures, tmp_path):
    """``evaluation.py`` on a folder with Parquet files, as the hub stores them."""
    image = datasets.Image()
    features = {name: datasets.Value("string") for name in ("key", "instruction", "winner", "task")}
    features |= {"source_image": image, "edited_images": datasets.Sequence(image)}
    rows = []
    for index, (source, *edits) in enumerate(pictures):
        rows.append({"key": f"k{index}", "instruction": "make it red", "winner": str(index % 2)})
        rows[-1] |= {"task": ("subject_add", "cref")[index // 4], "source_image": source, "edited_images": edits}
    folder = tmp_path / "VCReward-Bench" / "data"
    folder.mkdir(parents=True)
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(folder / "test-0.parquet")
    arguments = ["--dataset", folder.parent, "--results_dir", tmp_path / "results", "--output", tmp_path / "table"]
    return BenchCommand(vc_reward, folder, tmp_path, arguments, "judge")


def test_the_edit_with_the_higher_score_wins(bench, pictures, tmp_path):
    judge = BrightnessJudge()
    assert bench(judge) == 0
    assert len(judge.questions) == 16 and "make it red" in judge.questions[0]
    assert [row["winner"] for row in bench.rows] == [0, 1] * 4
    heading, line = (text.split() for text in (tmp_path / "table.txt").read_text().splitlines())
    cells = dict(zip(heading, line))
    assert cells["pairs"] == "8" and cells["ties"] == "0"
    right = []  # where the edit nearer in brightness to its source is the winner
    for index, images in enumerate(pictures):
        source, *edits = map(brightness, images)
        distance = [abs(source - edit) for edit in edits]
        right.append(distance[index % 2] < distance[1 - index % 2])
    for name, own in (("subject_add", right[:4]), ("cref", right[4:]), ("average", right)):
        assert float(cells[name]) == pytest.approx(sum(own) / len(own), abs=1e-4)


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
    assert all(sorted(row["scores"]) == [0.0, 1.0] and row["asked"]["compares"] for row in bench.rows)


def test_ties_are_wrong_and_missing_rows_are_counted(bench, capsys):
    calls = itertools.count()

    def tied(pairs):
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return [Verdict(0.5)] * len(pairs)

    assert bench(tied, "--batch_size", "2") == 1
    output = capsys.readouterr()
    assert "1 items have no result" in output.err
    assert output.out.splitlines()[-1].split()[-1] == "7" and "0.0000" in output.out


def test_winners(bench, tmp_path, capsys):
    assert [vc_reward.winner_index(value, False) for value in (0, "1", "A", "b")] == [0, 1, 0, 1]
    assert [vc_reward.winner_index(value, True) for value in (1, "2")] == [0, 1]
    with pytest.raises(ValueError):
        vc_reward.winner_index("left", False)
    file = tmp_path / "rows.jsonl"
    row = {"key": "k", "instruction": "i", "task": "t", "source_image": "a.png", "edited_images": ["a.png", "b.png"]}
    file.write_text(json.dumps(row | {"winner": "left"}) + "\n")
    assert bench(BrightnessJudge(), "--dataset", file) == 1
    assert "item 0 k: winner" in capsys.readouterr().err
    file.write_text("")
    assert bench(BrightnessJudge(), "--dataset", file) == 2
