"""EditReward-Bench and VCReward-Bench: forms of the data sets, broken rows, winners, tables.

Scores: test_bench_road.py.
"""

import json
import sys
import threading
from types import SimpleNamespace

import datasets
import pandas as pd
import pytest
import uvicorn
from bench_tools import EVALUATION, ContentJudge, edit_lines
from fakes import fake_judge
from pairing_tools import digest, p_yes_of, read_lines, write_lines
from PIL import Image

from paco_eval import edit
from paco_eval import vc as vc_reward
from paco_eval.benchmark import as_text
from paco_eval.edit import (
    COLUMNS,
    GROUPS,
    HUB_NAME,
    EditReward,
    EditRows,
    group_table,
    parse_row,
    task_table,
)
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.rewards.remote.service import build_app
from paco_judge.questions import load_editing_questions
from paco_judge.verdict import Verdict


def test_tables_by_hand():
    """Of extract, text_change (two), compose and a task of the user's own; one pair is a tie."""
    made = (
        ("extract", "overall", [0.9, 0.1]),
        ("text_change", "overall", [0.5, 0.5]),
        ("text_change", "overall", [0.2, 0.3]),
        ("compose", "overall", [1, 0]),
        ("own", "overall", [1, 0]),
        ("extract", "consistency", [0.1, 0.2]),
    )
    rows = []
    for task, dimension, scores in made:
        row = parse_row({"task_type": task, "dimension": dimension, "scores": scores})
        rows.append({"model": "m"} | row)
    results = pd.DataFrame(rows)
    columns = ["dimension", "right when", "pairs", *GROUPS, "average", "pair mean", "ties"]
    assert as_text(group_table(results)[columns].iloc[1:]).splitlines()[1:] == [
        "consistency    lenient      1       -           - 0.0000         -   0.0000     0.0000     0",
        # Groups and the average are means over task types: text_change 0 or ½, the others 1.
        "    overall     strict      5       -           - 1.0000    0.5000   0.7500     0.6000     1",
        "    overall    lenient      5       -           - 1.0000    0.7500   0.8750     0.8000     1",
    ]
    tasks = task_table(results).set_index("task type")
    columns = [f"overall: {name}" for name in ("pairs", "strict", "lenient")]
    assert tasks.loc["text_change", columns].tolist() == [2, 0, 0.5]
    assert tasks["consistency: pairs"].tolist() == [0, 0, 0, 1]


def test_results_of_the_authors_script_are_in_the_tables(edits, tmp_path, capsys):
    """The same scores in its form, a file for each task type and dimension, give the same rows."""
    assert edits(ContentJudge()) == 0
    results = edits.file.parent
    theirs = results / "Other" / "backbone"
    for row in edits.rows:
        file = theirs / row["task_type"] / f"{row['dimension']}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        known = read_lines(file) if file.exists() else []
        write_lines(file, [*known, {"key": row["key"], "idx": 0, "score": row["scores"]}])
    (results / "Other" / ".cache").mkdir()
    write_lines(results / "Other" / ".cache" / "backbone_x.jsonl", [{"key": "k", "result": {}}])

    def table(model, folder, *options):
        command = ["--result_dir", str(folder), "--output", str(tmp_path / "table")]
        assert edit.tables_main([*command, *options]) == 0
        lines = (tmp_path / "table.txt").read_text().splitlines()
        return [line.split()[1:] for line in lines if line.split()[:1] == [model]]

    ours = table("judge", results)
    assert len(ours) > 6 and table("Other/backbone", results) == ours
    assert table("backbone", results / "Other", "--backbone", "backbone") == ours
    assert table("backbone", theirs) == ours
    capsys.readouterr()
    write_lines(file, [*read_lines(file), {"key": ["a", "b"], "result": 1}])
    assert edit.tables_main(["--results_dir", str(results)]) == 1
    message = capsys.readouterr().err
    assert f"{file} row {len(read_lines(file))}" in message and message.count("\n") == 1


def test_one_question_decides_every_dimension(edits):
    class SizeJudge(ContentJudge):
        def answer(self, pair):
            return Verdict(1.0 if pair.image_a.size == pair.image_b.size else 0.0)

    edits.file = edits.file.with_name("judge-vediting_consistency.jsonl")
    words = ["--question", "editing_consistency", "--image_labels", "<img{n}>: "]
    for resize in ([], ["--resize_edits"]):
        judge = SizeJudge()
        assert edits(judge, *words, *resize) == 0
        assert {text.partition(" Does ")[2][:10] for text in judge.questions} == {"everything"}
        for row in edits.rows:
            assert row["scores"] == [len(resize)] * 2
            assert row["asked"]["resize_edits"] is bool(resize)
            assert row["asked"]["image_labels"] == "<img{n}>: "
        edits.file.unlink()


def contents(dataset):
    """(question, pixels, pixels) of every pair."""
    rows = EditRows(str(dataset), HUB_NAME, COLUMNS, "input_image", "output_images")
    bench = EditReward(rows, load_editing_questions(), resize_edits=False)
    pairs = [pair for item in bench.items() for pair in bench.pairs(item)]
    return [(pair.question, *(image.tobytes() for image in pair.images)) for pair in pairs]


def test_every_format_holds_the_same(examples, edits, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = datasets.Dataset.from_list(examples)
    whole.save_to_disk(tmp_path / "saved")
    first = whole.select(range(9))
    datasets.DatasetDict({"train": whole, "other": first}).save_to_disk(tmp_path / "splits")
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for part, rows in enumerate((first, whole.select(range(9, 20)))):
        rows.to_parquet(tmp_path / "parquet" / "data" / f"train-0000{part}-of-00002.parquet")
    expected = contents(edits.data)
    for name in ("saved", "splits", "parquet"):
        assert contents(tmp_path / name) == expected, name


def test_unusable_data_sets(edits, tmp_path, capsys):
    edits.data.write_text('{"key": 1, "instruction": "", "output_images": []}')
    assert edits.main() == 1
    assert "task_type, dimension, input_image" in capsys.readouterr().err
    assert edits.main("--dataset", tmp_path / "nowhere") == 1
    assert "hf download" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_ties_are_wrong_and_broken_rows_are_counted(choices, capsys, monkeypatch):
    image = choices.data.parent / "3a.png"
    image.write_bytes(image.read_bytes()[:-40])
    edit_lines(choices.data, {1: {"winner": "left"}, 4: {"edited_images": []}})
    assert choices(lambda pairs: [Verdict(0.5)] * len(pairs)) == 1
    output = capsys.readouterr()
    assert all(f"item {index} k{index}: " in output.err for index in (1, 3, 4))
    *_, average, ties = output.out.split()
    assert (average, ties) == ("0.0000", "5")
    choices.data.write_text("")
    assert choices(ContentJudge()) == 1
    monkeypatch.chdir(EVALUATION / "VCReward-Bench")  # our code's folder is not the data set
    assert vc_reward.main(["--results_dir", str(choices.out / "results")]) == 1
    assert vc_reward.HUB_NAME in capsys.readouterr().err


def test_winners():
    assert [vc_reward.winner_index(value, False) for value in (0, "1", "A", "b")] == [0, 1, 0, 1]
    assert [vc_reward.winner_index(value, True) for value in (1, "2")] == [0, 1]


@pytest.fixture
def edit_score(monkeypatch):
    """A reward service of EditScore, whose package and model are stand-ins; (URL, grades)."""
    parser = SimpleNamespace(parse_vlm_output_to_dict=json.loads)
    prompts = {
        "_context_no_delimit_reasoning_first": "context",
        "_prompts_0shot_two_image_edit_rule": "rules",
        "_prompts_0shot_tie_rule_SC": "edit: <instruction>",
        "_prompts_0shot_rule_PQ": "quality",
    }
    package = SimpleNamespace(vie_prompts=SimpleNamespace(**prompts), json_parser=parser)
    monkeypatch.setitem(sys.modules, "editscore", package)
    monkeypatch.setitem(sys.modules, "editscore.json_parser", parser)

    def grades(text, *images):
        return [25 * p_yes_of(*map(digest, images), f"{text} {number}") for number in (1, 2)]

    def respond(number, asked):
        images, text = fake_judge.request_content(asked)
        return 200, fake_judge.written(json.dumps({"score": grades(text, *images)})), {}

    with fake_judge.FakeJudge(respond, models=["EditScore-7B"]) as model:
        (reward,) = build_rewards(
            {"edit_score": 1.0}, {"edit_score": {"base_url": model.url}}
        ).values()
        app = build_app(reward, "edit_score")
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            thread.join(0.01)
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}", grades
        server.should_exit = True
        thread.join()


def test_edit_score_grades_the_edits_in_each_dimension(edits, edit_score, capsys):
    """Rows 3n to 3n+2 have the same edits and three dimensions."""
    url, grades = edit_score
    edits.file = edits.file.with_name("edit_score.jsonl")
    words = ["--scorer", "edit_score", "--resize_edits"]
    assert edits.main(*words) == 1
    assert "--server" in capsys.readouterr().err
    assert edits.main(*words, "--server", url, "--batch_size", "7") == 0
    assert len(edits.rows) == 20
    for row, item in zip(edits.rows, read_lines(edits.data), strict=True):
        assert row["dimension"] == item["dimension"]
        before = Image.open(edits.data.parent / item["input_image"])
        expected = []
        for file in item["output_images"]:
            edit = Image.open(edits.data.parent / file).resize(before.size)
            followed, kept = grades(f"context\nrules\nedit: {item['instruction']}", before, edit)
            quality = min(grades("context\nquality", edit))
            of = {"prompt_following": followed, "consistency": kept}
            of["overall"] = (min(followed, kept) * quality) ** 0.5
            expected.append(of[item["dimension"]] / 25)
        assert row["scores"] == pytest.approx(expected)
    assert "edit_score" in capsys.readouterr().out
