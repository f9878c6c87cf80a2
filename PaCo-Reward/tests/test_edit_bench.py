"""EditReward-Bench: rows and their scores, forms of the data set, broken rows, tables, the command line."""

import io
import json
from pathlib import Path

import calculate_statistics
import numpy as np
import pandas as pd
import pytest
from bench_tools import TASKS, BrightnessJudge, edit_lines
from calculate_statistics import GROUP_OF, GROUPS, KINDS, group_table, parse_row, task_table
from evaluation import command_line, load_bench
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_eval.results import BenchError
from paco_judge.client import Pair
from paco_judge.questions import EDIT_DIMENSIONS, editing_texts, load_editing_questions

QUESTIONS = load_editing_questions()


scores = st.sampled_from([0.0, 0.2, 0.5, 0.500001, 1.0])
rows_of_results = st.lists(
    st.fixed_dictionaries(
        {
            "task_type": st.sampled_from([*TASKS, "own_task"]),
            "dimension": st.sampled_from(EDIT_DIMENSIONS),
            "scores": st.tuples(scores, scores),
        }
    ),
    min_size=1,
    max_size=60,
)


def share(rows, kind):
    """Accuracy by counting; NaN for no rows."""
    right = [a > b or (kind == "lenient" and a == b) for a, b in (row["scores"] for row in rows)]
    return sum(right) / len(right) if right else float("nan")


@given(rows_of_results)
def test_tables_of_random_results(rows):
    results = pd.DataFrame([{"model": "m"} | parse_row(row) for row in rows])
    table = group_table(results)
    assert {*zip(table["dimension"], table["right when"])} == {
        (row["dimension"], kind) for row in rows for kind in KINDS
    }
    for line in table.to_dict("records"):
        mine, kind = [row for row in rows if row["dimension"] == line["dimension"]], line["right when"]
        for group in (*GROUPS, *(["other"] if any(row["task_type"] == "own_task" for row in rows) else [])):
            members = [row for row in mine if row["task_type"] in GROUPS.get(group, ("own_task",))]
            assert line[group] == pytest.approx(share(members, kind), nan_ok=True)
        assert line["average"] == pytest.approx(share(mine, kind)) and line["pairs"] == len(mine)
        assert line["ties"] == sum(row["scores"][0] == row["scores"][1] for row in mine)
        tasks = {row["task_type"] for row in mine}
        of_tasks = [share([row for row in mine if row["task_type"] == task], kind) for task in tasks]
        assert line["task mean"] == pytest.approx(np.mean(of_tasks))
    for line in task_table(results).to_dict("records"):
        for dimension in {row["dimension"] for row in rows}:
            of_task = [row for row in rows if (row["dimension"], row["task_type"]) == (dimension, line["task type"])]
            for kind in KINDS:
                assert line[f"{dimension}: {kind}"] == pytest.approx(share(of_task, kind), nan_ok=True)


def test_groups_are_the_published_ones():
    assert len(TASKS) == len(set(TASKS)) == 13
    assert [GROUP_OF[task] for task in ("subject-add", "tone_transfer", "extract", "compose")] == [*GROUPS]


def test_table_files(edits, tmp_path, capsys):
    assert edits(BrightnessJudge()) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "summary.txt").read_text() in printed
    second = edits.file.with_name("second_judge.jsonl")
    second.write_text("".join(json.dumps(row) + "\n" for row in edits.rows if row["dimension"] != "overall"))
    output = tmp_path / "tables" / "v1.5"
    output.parent.mkdir()
    command = ["--result_dir", str(second.parent), "--output", str(output)]
    assert calculate_statistics.main(command) == 0
    text = Path(f"{output}.txt").read_text()
    assert capsys.readouterr().out == text
    lines = [line.split() for line in text.splitlines()]
    shown = [line[1:3] for line in lines if line[:1] == ["second_judge"]][:4]
    assert shown == [[dimension, kind] for dimension in ("consistency", "prompt_following") for kind in KINDS]
    latex = Path(f"{output}.tex").read_text()
    assert latex.count(r"\begin{tabular}{lllr") == latex.count(r"\bottomrule") == 2
    assert r"second\_judge & prompt\_following & lenient" in latex
    assert calculate_statistics.main([*command, "--backbone", "X-GenGroup/second_judge"]) == 0
    assert "judge  " not in Path(f"{output}.txt").read_text().replace("second_judge", "")

    capsys.readouterr()
    good = '{"scores": [0.5, 0.1], "dimension": "overall", "task_type": "extract"}'
    for bad in ("{}", good.replace("overall", "beauty"), good.replace("0.5", '"a"'), good.replace("0.1", "null"), "["):
        second.write_text(f"{good}\n{bad}\n")
        assert calculate_statistics.main(command) == 2
        assert "second_judge.jsonl line 2" in capsys.readouterr().err
    assert calculate_statistics.main(["--results_dir", str(tmp_path), *command[2:]]) == 2


# ---------------------------------------------------------------- scores


def test_scores_are_the_judges_answers(edits, examples):
    judge = BrightnessJudge()
    assert edits(judge) == 0
    rows = edits.rows
    assert [row["index"] for row in rows] == list(range(len(examples)))
    for row, example in zip(rows, examples):
        assert row["key"] == example["key"] and row["task_type"] == example["task_type"]
        for edit, answers, score in zip(example["output_images"], row["answers"], row["scores"], strict=True):
            texts = editing_texts(QUESTIONS, example["instruction"]).values()
            follows, stays = (judge.score(Pair(example["input_image"], edit, text)) for text in texts)
            expected = {"prompt_following": follows, "consistency": stays}
            asked = expected if row["dimension"] == "overall" else {row["dimension"]: expected[row["dimension"]]}
            assert answers == pytest.approx(asked)
            expected["overall"] = np.sqrt(follows * stays)
            assert score == pytest.approx(expected[row["dimension"]])
    # 20 rows are about 7 times two edits, each asked two questions once (overall repeats what the other two ask).
    assert sum(judge.batches) == 7 * 2 * 2


@pytest.mark.parametrize("resized", [False, True])
def test_one_question_decides_every_dimension(edits, examples, resized):
    class SizeJudge(BrightnessJudge):
        def score(self, pair):
            return 1.0 if pair.image_a.size == pair.image_b.size else 0.0

    image = edits.data.parent / "images" / "4_b.png"
    Image.open(image).resize((7, 9)).save(image)
    judge = SizeJudge()
    assert edits(judge, "--question", "editing_consistency", *["--resize_edits"] * resized) == 0
    assert {text.partition(" Does ")[2][:10] for text in judge.questions} == {"everything"}
    edits.file = edits.file.with_name("judge-vediting_consistency.jsonl")
    assert edits.rows[4]["scores"] == [1.0, float(resized)] and edits.rows[4]["asked"]["resize_edits"] == resized
    assert all(row["scores"] == [1.0, 1.0] for row in edits.rows if row["index"] != 4)
    assert {row["dimension"] for row in edits.rows} == set(EDIT_DIMENSIONS)


def test_broken_rows_are_reported_and_the_run_continues(edits, tmp_path, capsys):
    images = edits.data.parent / "images"
    (images / "4_a.png").write_bytes(b"no picture")
    (images / "5_in.png").unlink()
    whole = (images / "6_b.png").read_bytes()
    (images / "6_b.png").write_bytes(whole[: len(whole) // 2])
    edit_lines(
        edits.data,
        {
            8: lambda row: {**row, "dimension": "beauty"},
            9: lambda row: {**row, "output_images": row["output_images"][:1]},
            10: lambda row: {**row, "instruction": "  "},
            11: lambda row: {name: value for name, value in row.items() if name != "task_type"},
            13: lambda row: {**row, "key": "edit40a"},
            14: lambda row: {**row, "input_image": None},
            15: "{}",
            16: lambda row: {**row, "key": ["edit50a"]},
            17: lambda row: {name: value for name, value in row.items() if name != "output_images"},
            18: lambda row: {**row, "output_images": "a.png"},
        },
    )
    assert edits(BrightnessJudge()) == 1
    lines = capsys.readouterr().err.splitlines()
    named = {
        4: "output_images[0]", 5: "input_image", 6: "output_images[1]", 8: "beauty", 9: "output_images",
        10: "instruction", 11: "task_type", 13: "key", 14: "input_image", 15: "lacks", 16: "key",
        17: "output_images", 18: "output_images",
    }  # fmt: skip
    for row, cause in named.items():
        assert any(line.startswith(f"row {row} ") and cause in line for line in lines), row
    good = [0, 1, 2, 3, 7, 12, 19]
    assert [row["index"] for row in edits.rows] == good and (tmp_path / "summary.txt").exists()

    (images / "6_b.png").write_bytes(whole)  # repaired: the same command adds it
    assert edits(BrightnessJudge()) == 1 and [row["index"] for row in edits.rows] == [*good, 6]


# ---------------------------------------------------------------- forms of the data set


def hugging_face(rows):
    """The rows as a Hugging Face data set with image columns."""
    import datasets

    text, image = datasets.Value("string"), datasets.Image()
    columns = {"key": datasets.Sequence(text), "instruction": text, "input_image": image}
    columns |= {"output_images": datasets.Sequence(image), "task_type": text, "dimension": text}
    return datasets.Dataset.from_list(rows, features=datasets.Features(columns))


def contents(bench):
    """(question, pixels, pixels) of every pair."""
    pairs = [pair for item in bench for pair in item.prepare()[0]]
    return [(pair.question, *(np.array(image).tobytes() for image in pair.images)) for pair in pairs]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The cache of parquet files goes to the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["saved", "splits", "parquet", "parquet file", "paths in parquet"])
def test_every_format_holds_the_same(kind, examples, edits, tmp_path, own_cache):
    import datasets

    place = tmp_path / "copy"
    expected = load_bench(str(edits.data), QUESTIONS)
    if kind == "saved":
        hugging_face(examples).save_to_disk(place)
    elif kind == "splits":
        datasets.DatasetDict({"train": hugging_face(examples), "other": hugging_face(examples[:2])}).save_to_disk(place)
    elif kind == "paths in parquet":
        place = edits.data.parent / "rows.parquet"
        datasets.Dataset.from_list([json.loads(line) for line in edits.data.read_text().splitlines()]).to_parquet(place)
    else:
        (place / "data").mkdir(parents=True)
        for part in range(2):
            file = place / "data" / f"train-0000{part}-of-00002.parquet"
            hugging_face(examples[10 * part : 10 * part + 10]).to_parquet(file)
        if kind == "parquet file":
            place, expected = file, expected[10:]
    bench = load_bench(str(place), QUESTIONS)
    assert [item.fields["key"] for item in bench] == [item.fields["key"] for item in expected]
    assert contents(bench) == contents(expected)
    if kind == "splits":
        assert len(load_bench(str(place), QUESTIONS, "other")) == 2
        with pytest.raises(BenchError, match="--split"):
            load_bench(str(place), QUESTIONS, "test")
        datasets.DatasetDict({"a": hugging_face(examples), "b": hugging_face(examples)}).save_to_disk(tmp_path / "two")
        with pytest.raises(BenchError, match="--split"):
            load_bench(str(tmp_path / "two"), QUESTIONS)


def test_a_broken_image_in_a_saved_data_set_affects_one_row(examples, tmp_path):
    buffer = io.BytesIO()
    examples[0]["input_image"].save(buffer, "PNG")
    rows = [dict(row) for row in examples[:3]]
    rows[1]["output_images"] = [{"bytes": b"no picture", "path": None}, {"bytes": buffer.getvalue(), "path": None}]
    hugging_face(rows).save_to_disk(tmp_path / "saved")
    bench = load_bench(str(tmp_path / "saved"), QUESTIONS)
    assert len(bench) == 3
    bench[0].prepare()
    with pytest.raises(ValueError, match=r"output_images\[0\]"):
        bench[1].prepare()


def test_the_default_data_set(edits, tmp_path, monkeypatch):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    edits.data.parent.rename(tmp_path / "EditReward-Bench")
    assert len(load_bench(None, QUESTIONS)) == 20


def test_unusable_data_sets(edits, examples, tmp_path, capsys, own_cache):
    (tmp_path / "empty").mkdir()
    edit_lines(edits.data, dict.fromkeys(range(20), lambda row: {"key": 1, "instruction": "", "output_images": []}))
    hugging_face(examples[:2]).remove_columns(["key"]).save_to_disk(tmp_path / "saved")
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl").write_text('{}\n\n{"key": ["edit40a"')
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    (tmp_path / "text.csv").write_text("a,b")
    capsys.readouterr()
    for dataset, named in (
        (tmp_path / "nowhere", "hf download"),
        ("./nowhere/here", "hf download"),
        (tmp_path / "empty", "hf download"),
        (edits.data, "task_type, dimension, input_image"),
        (tmp_path / "saved", "key"),
        (tmp_path / "none.jsonl", "none.jsonl"),
        (tmp_path / "cut.jsonl", "cut.jsonl line 3"),
        (tmp_path / "bad.parquet", "bad.parquet"),
        (tmp_path / "text.csv", "text.csv"),
        ("EditScore/EditReward-Bench", "HF_ENDPOINT"),
    ):
        assert edits.main("--dataset", dataset) == 2
        reported = capsys.readouterr().err
        assert reported.startswith("error: ") and reported.count("\n") == 1 and named in reported, reported
    assert not (tmp_path / "results").exists()


def test_command_line_defaults(capsys):
    assert command_line([]).model == "X-GenGroup/PaCo-Reward-7B"
    assert command_line(["--server", "http://h:1"]).model == "PaCo-Reward-7B"
    published = command_line(["--benchmark_dir", "b", "--result_dir", "r", "--backbone", "m"])
    assert (published.dataset, published.results_dir, published.model) == ("b", "r", "m")
    assert command_line(["--port", "8001"]).server == "http://127.0.0.1:8001"
    with pytest.raises(SystemExit):
        command_line(["--batch_size", "0"])
    assert "--batch_size" in capsys.readouterr().err
