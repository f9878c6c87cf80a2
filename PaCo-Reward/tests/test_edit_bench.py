"""EditReward-Bench: scores, forms of the data set, broken rows, tables, the command line."""

import datasets
import numpy as np
import pandas as pd
import pytest
from bench_tools import ContentJudge, edit_lines

from paco_eval.edit import (
    GROUPS,
    EditReward,
    command_line,
    group_table,
    parse_row,
    task_table,
)
from paco_eval.results import as_text
from paco_judge.questions import load_editing_questions
from paco_judge.verdict import Verdict

QUESTIONS = load_editing_questions()


def test_tables_by_hand():
    """Of extract, text_change (two), compose and a task of the user's own; one pair is a tie."""
    made = (
        ("extract", [0.9, 0.1]),
        ("text_change", [0.5, 0.5]),
        ("text_change", [0.2, 0.3]),
        ("compose", [1, 0]),
        ("own", [1, 0]),
    )
    rows = [{"task_type": task, "dimension": "overall", "scores": scores} for task, scores in made]
    rows.append({"task_type": "extract", "dimension": "consistency", "scores": [0.1, 0.2]})
    results = pd.DataFrame([{"model": "m"} | parse_row(row) for row in rows])
    columns = ["dimension", "right when", "pairs", *GROUPS, "average", "pair mean", "ties"]
    table = group_table(results)[columns]
    assert table.astype(object).where(table.notna(), "-").values.tolist() == [
        ["consistency", "strict", 1, "-", "-", 0, "-", 0, 0, 0],
        ["consistency", "lenient", 1, "-", "-", 0, "-", 0, 0, 0],
        # Groups and the average are means over task types: text_change 0 or ½, the others 1.
        ["overall", "strict", 5, "-", "-", 1, 0.5, 0.75, pytest.approx(3 / 5), 1],
        ["overall", "lenient", 5, "-", "-", 1, 0.75, 0.875, pytest.approx(4 / 5), 1],
    ]
    tasks = task_table(results).set_index("task type")
    assert tasks.loc[
        "text_change", ["overall: pairs", "overall: strict", "overall: lenient"]
    ].tolist() == [2, 0, 0.5]
    assert tasks.loc["own", "group"] == "other"
    counts = as_text(tasks[["consistency: pairs"]]).split()
    assert counts == ["consistency:", "pairs", "0", "0", "0", "1"]


def test_repeated_questions_are_asked_once(edits):
    """20 rows are about 7 times two edits, each asked two questions: overall repeats what the
    other two ask.
    """
    judge = ContentJudge()
    assert edits(judge) == 0
    assert sum(judge.batches) == 7 * 2 * 2


def test_one_question_decides_every_dimension(edits):
    class SizeJudge(ContentJudge):
        def answer(self, pair):
            return Verdict(1.0 if pair.image_a.size == pair.image_b.size else 0.0)

    edits.file = edits.file.with_name("judge-vediting_consistency.jsonl")
    for resized in (False, True):
        judge = SizeJudge()
        assert edits(judge, "--question", "editing_consistency", *["--resize_edits"] * resized) == 0
        assert {text.partition(" Does ")[2][:10] for text in judge.questions} == {"everything"}
        for row in edits.rows:
            assert row["scores"] == [float(resized)] * 2 and row["asked"]["resize_edits"] == resized
        edits.file.unlink()


def test_broken_rows_are_reported_and_the_run_continues(edits, tmp_path, capsys):
    image = edits.data.parent / "images" / "6_b.png"
    image.write_bytes(image.read_bytes()[:-40])
    changes = {8: {"dimension": "beauty"}, 9: {"output_images": []}, 10: {"instruction": "  "}}
    for number, new in changes.items():
        edit_lines(edits.data, {number: lambda row, new=new: row | new})
    edit_lines(edits.data, {15: "{}"})
    assert edits(ContentJudge()) == 1
    lines = capsys.readouterr().err.splitlines()
    named = {
        6: "output_images[1]",
        8: "no editing dimension 'beauty'",
        9: "output_images",
        10: "instruction",
        15: "lacks",
    }
    for row, cause in named.items():
        assert any(line.startswith(f"item {row} ") and cause in line for line in lines), row
    assert {row["index"] for row in edits.rows} == {*range(20)} - {*named} and (
        tmp_path / "summary.txt"
    ).exists()


def contents(dataset):
    """(key, question, pixels, pixels) of every pair."""
    bench = EditReward.load(str(dataset), QUESTIONS)
    rows = []
    for item in bench.items():
        for pair in bench.pairs(item):
            pixels = [np.array(image).tobytes() for image in pair.images]
            rows.append((item.fields["key"], pair.question, *pixels))
    return rows


def test_every_format_holds_the_same(examples, edits, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_list(examples)
    whole.save_to_disk(tmp_path / "saved")
    first = whole.select(range(9))
    last = whole.select(range(9, 20))
    datasets.DatasetDict({"train": whole, "other": first}).save_to_disk(tmp_path / "train")
    datasets.DatasetDict({"first": first, "last": last}).save_to_disk(tmp_path / "splits")
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for part, rows in enumerate((first, last)):
        rows.to_parquet(tmp_path / "parquet" / "data" / f"train-0000{part}-of-00002.parquet")
    expected = contents(edits.data)
    for name in ("saved", "train", "splits", "parquet"):
        assert contents(tmp_path / name) == expected, name


def test_unusable_data_sets(edits, tmp_path, capsys):
    edit_lines(
        edits.data,
        dict.fromkeys(range(20), lambda row: {"key": 1, "instruction": "", "output_images": []}),
    )
    for dataset, named in (
        (tmp_path / "nowhere", "hf download"),
        (edits.data, "task_type, dimension, input_image"),
    ):
        assert edits.main("--dataset", dataset) == 1 and named in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_command_line_defaults():
    assert command_line([]).model == "X-GenGroup/PaCo-Reward-7B"
    assert command_line(["--server", "http://h:1"]).model == "PaCo-Reward-7B"
    published = command_line(["--benchmark_dir", "b", "--result_dir", "r", "--backbone", "m"])
    assert (published.dataset, published.results_dir, published.model) == ("b", "r", "m")
    assert command_line(["--port", "8001"]).server == "http://127.0.0.1:8001"
