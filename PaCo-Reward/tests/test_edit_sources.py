"""EditReward-Bench: forms of the data set, engines, tables and the command line."""

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parent / "evaluation" / "Edit-Bench"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # the scripts run from their own folder

import calculate_statistics
import evaluation
from edit_data import load_bench, prepare
from edit_metrics import group_of
from edit_tools import COLUMNS, edit_lines, hugging_face, results, save_jsonl, share

from paco_eval.engines import server_engine
from paco_eval.errors import BenchError, ItemError
from paco_eval.progress import Progress

# ---------------------------------------------------------------- sources


def pixels(bench):
    prepared = [prepare(bench, row)[0] for row in bench.rows]
    return [(pair.question, np.array(pair.image_a), np.array(pair.image_b)) for pairs in prepared for pair in pairs]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """What reading parquet files leaves behind goes where the test's other files go."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["saved", "splits", "parquet", "parquet file", "paths in parquet"])
def test_every_format_holds_the_same(kind, examples, data, tmp_path, own_cache):
    import datasets

    place = tmp_path / "copy"
    if kind == "saved":
        hugging_face(examples).save_to_disk(place)
    elif kind == "splits":
        datasets.DatasetDict({"train": hugging_face(examples), "other": hugging_face(examples[:2])}).save_to_disk(place)
    elif kind == "paths in parquet":
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        place = data.parent / "rows.parquet"
        datasets.Dataset.from_list(lines).to_parquet(place)
    else:
        (place / "data").mkdir(parents=True)
        whole = hugging_face(examples)
        for part in range(2):
            file = place / "data" / f"train-0000{part}-of-00002.parquet"
            whole.select(range(10 * part, 10 * part + 10)).to_parquet(file)
        if kind == "parquet file":
            place, examples = file, examples[10:]
    bench, expected = load_bench(str(place)), load_bench(str(data))
    assert not bench.broken
    shift = len(expected.rows) - len(bench.rows)
    assert [row.key for row in bench.rows] == [row.key for row in expected.rows[shift:]]
    found, wanted = pixels(bench), pixels(expected)
    assert len(found) > 20
    for (question, *images), (other, *others) in zip(found, wanted[len(wanted) - len(found) :], strict=True):
        assert question == other and all(np.array_equal(a, b) for a, b in zip(images, others))
    if kind == "splits":
        assert len(load_bench(str(place), "other").rows) == 2
        with pytest.raises(BenchError, match="has the splits train, other; choose one with --split"):
            load_bench(str(place), "test")


def test_a_broken_image_in_a_saved_data_set_is_one_rows_problem(examples, tmp_path):
    import datasets

    buffer = io.BytesIO()
    examples[0]["input_image"].save(buffer, "PNG")
    rows = [dict(row) for row in examples[:3]]
    rows[1]["output_images"] = [{"bytes": b"no picture", "path": None}, {"bytes": buffer.getvalue(), "path": None}]
    hugging_face(rows).save_to_disk(tmp_path / "saved")
    bench = load_bench(str(tmp_path / "saved"))
    assert datasets.load_from_disk(str(tmp_path / "saved")).num_rows == len(bench.rows) == 3
    prepare(bench, bench.rows[0])
    with pytest.raises(ItemError, match=r"image output_images\[0\] cannot be read"):
        prepare(bench, bench.rows[1])


def test_odd_texts_in_json_lines(examples, tmp_path):
    """Line and paragraph separators inside a text do not end a line."""
    rows = [{**examples[0], "instruction": "one\u2028two\x85three\x0bfour"}, examples[1]]
    bench = load_bench(str(save_jsonl(rows, tmp_path / "odd")))
    assert not bench.broken and "one\u2028two\x85three\x0bfour" in bench.rows[0].questions[0][1]


def test_the_default_data_set(data, tmp_path, monkeypatch):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    data.parent.rename(tmp_path / "EditReward-Bench")
    assert len(load_bench(None).rows) == 20


def test_data_sets_that_cannot_be_used(answering_judge, data, examples, tmp_path, capsys, own_cache):
    def said(dataset, *more):
        status = evaluation.main(["--model", str(answering_judge), "--dataset", str(dataset), "--engine", "transformers",
                                  "--results_dir", str(tmp_path / "r"), *more])  # fmt: skip
        text = capsys.readouterr().err
        assert status == 2 and text.startswith("error: ") and text.count("\n") == 1, text
        return text

    assert "does not exist; download it with `hf download" in said(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no parquet files, no JSON lines" in said(tmp_path / "empty")
    edit_lines(data, dict.fromkeys(range(20), lambda row: {"key": 1, "instruction": "", "output_images": [], "x": 2}))
    assert "lacks the columns task_type, dimension, input_image; it has instruction, key, output_images, x" in said(
        data
    )
    hugging_face(examples[:2]).remove_columns(["key"]).save_to_disk(tmp_path / "saved")
    assert "lacks the columns key; it has" in said(tmp_path / "saved")
    (tmp_path / "none.jsonl").write_text("\n")
    assert "holds no rows" in said(tmp_path / "none.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    assert "cannot be read" in said(tmp_path / "bad.parquet")
    (tmp_path / "text.csv").write_text("a,b")
    assert "pass one .jsonl file, or .parquet files; this is text.csv" in said(tmp_path / "text.csv")
    assert "neither a local folder nor can it be had from the hub" in said("EditScore/EditReward-Bench")
    assert not (tmp_path / "r").exists()


# ---------------------------------------------------------------- engines


def test_engines_that_cannot_be_had(data, tmp_path, capsys, monkeypatch):
    base = ["--dataset", str(data), "--results_dir", str(tmp_path / "r")]

    def said(*arguments):
        status = evaluation.main([*base, *arguments])
        text = capsys.readouterr().err
        assert status == 2 and text.count("\n") == 1, text
        return text

    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "choose --engine transformers, or --server URL" in said()
    assert "no judge answers at http://127.0.0.1:9" in said("--server", "http://127.0.0.1:9")
    assert "--server: 'nowhere' is not an http" in said("--server", "nowhere")
    assert "model folder ./none does not exist" in said("--model", "./none", "--engine", "transformers")
    assert "--adapter needs --engine transformers" in said("--adapter", "a")
    assert list((tmp_path / "r").iterdir()) == []


def test_a_server_and_one_that_goes_away(fake_judge, data, tmp_path, monkeypatch, capsys):
    judge = fake_judge.FakeJudge(models=["PaCo-Reward-7B"])
    base = ["--dataset", str(data), "--results_dir", str(tmp_path / "results"), "--batch_size", "4"]
    base += ["--server", judge.url, "--output", str(tmp_path / "summary")]
    with judge:
        assert evaluation.main(base) == 0
        engine = server_engine(judge.url, "PaCo-Reward-7B", deadline_s=0.5)
    rows = [json.loads(line) for line in (tmp_path / "results" / "PaCo-Reward-7B.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and {row["engine"] for row in rows} == {"server"}
    for row in rows:
        assert row["scores"] == pytest.approx([0.75, 0.75])
    capsys.readouterr()
    (tmp_path / "results" / "PaCo-Reward-7B.jsonl").unlink()
    edit_lines(data, dict.fromkeys(range(20), lambda row: {**row, "instruction": "something new"}))
    monkeypatch.setattr(evaluation, "make_engine", lambda args: ("server", engine))
    assert evaluation.main(base) == 2
    assert "error: no judge answers" in capsys.readouterr().err


# ---------------------------------------------------------------- tables and the command line


def test_tables(judged, tmp_path, capsys):
    assert judged() == 0
    rows = results(tmp_path)
    second = tmp_path / "results" / "second_judge.jsonl"
    changed = [{**row, "scores": row["scores"][::-1]} for row in rows if row["dimension"] != "overall"]
    changed += [{**rows[0], "task_type": "own_task", "scores": [0.5, 0.5]}]
    second.write_text("".join(json.dumps(row) + "\n" for row in changed))
    output = tmp_path / "tables" / "v1.5"
    output.parent.mkdir()
    capsys.readouterr()
    assert calculate_statistics.main(["--results_dir", str(second.parent), "--output", str(output)]) == 0
    text = Path(f"{output}.txt").read_text()
    assert capsys.readouterr().out == text
    lines = [line.split() for line in text.splitlines()]
    mine = [row for row in rows if row["dimension"] == "consistency"]
    (strict,) = (line for line in lines if line[:3] == ["judge", "consistency", "strict"])
    by_group = [
        [row for row in mine if group_of(row["task_type"]) == group] for group in ("object", "scene", "advanced")
    ]
    assert strict[3] == str(len(mine)) and strict[4] == f"{share(by_group[0], False):.4f}"
    assert strict[6:8] == [f"{share(group, False):.4f}" for group in by_group[1:]]
    assert strict[8:10] == ["-", f"{share(mine, False):.4f}"]  # no `other` among this model's
    (lenient,) = (line for line in lines if line[:3] == ["second_judge", "prompt_following", "lenient"])
    assert lenient[8] == "1.0000" and lenient[-1] == str(1 + sum(r["scores"][0] == r["scores"][1] for r in changed[:-1]
                                                               if r["dimension"] == "prompt_following"))  # fmt: skip
    assert not any(line[:2] == ["second_judge", "overall"] for line in lines)
    (task,) = (line for line in lines if line[:3] == ["judge", "appearance", "style_change"])
    one = [row for row in mine if row["task_type"] == "style_change"]
    assert task[6:9] == (
        [str(len(one)), f"{share(one, False):.4f}", f"{share(one, True):.4f}"] if one else ["0", "-", "-"]
    )
    assert ["second_judge", "other", "own_task", "1", "0.0000", "1.0000"] in [line[:6] for line in lines]
    latex = Path(f"{output}.tex").read_text()
    assert latex.count(r"\begin{tabular}{lllr") == latex.count(r"\bottomrule") == 2
    assert r"second\_judge & prompt\_following & lenient" in latex
    width = latex.splitlines()[0].count("r", len(r"\begin{tabular}")) + 3
    assert latex.splitlines()[2].count("&") == width - 1


def test_tables_of_what_is_no_result(tmp_path, capsys):
    base = ["--results_dir", str(tmp_path), "--output", str(tmp_path / "o")]
    assert calculate_statistics.main(base) == 1
    assert "run evaluate_vllm_PaCoReward.sh first" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text('{"scores": [0.5, 0.1], "dimension": "overall", "task_type": "extract"}\n{}\n')
    assert calculate_statistics.main(base) == 1
    assert "x.jsonl line 2 is no result of evaluation.py" in capsys.readouterr().err


def test_help_teaches(capsys):
    for module in (evaluation, calculate_statistics):
        with pytest.raises(SystemExit) as stopped:
            module.parse(["--help"]) if module is evaluation else module.main(["--help"])
        assert stopped.value.code == 0
    text = capsys.readouterr().out
    for part in ("--server http://", "sqrt(prompt_following * consistency)", "Exit status", "save_to_disk", *COLUMNS):
        assert part in text
    assert evaluation.parse([]).model == "X-GenGroup/PaCo-Reward-7B"
    assert evaluation.parse(["--server", "http://h:1"]).model == "PaCo-Reward-7B"


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(monkeypatch, capsys):
    with Progress(3, 1, "row") as progress:
        progress.step()
        progress.step(scored=False)
        assert "rows" not in capsys.readouterr().err
        progress.step()
    assert "3/3 rows  elapsed 0:00:00  left 0:00:00" in capsys.readouterr().err

    main, other = os.openpty()
    with open(other, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress(2, 0, "row") as progress:
            progress.step()
            progress.say("row 1: broken")
            progress.step()
        shown = ""
        while "2/2" not in shown:  # a terminal hands on what was written piece by piece
            shown += os.read(main, 65536).decode()
    os.close(main)
    assert "row 1: broken" in shown and "100%" in shown
