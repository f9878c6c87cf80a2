"""EditReward-Bench: metrics against loops, the toy judge on a small data set, resuming, broken rows."""

import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_judge.client import Pair
from paco_judge.questions import EDIT_DIMENSIONS, editing_consistency_question, editing_instruction_question
from paco_judge.verdict import Verdict

HERE = Path(__file__).parent
FOLDER = HERE.parent / "evaluation" / "Edit-Bench"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # the scripts run from their own folder

import evaluation
from edit_metrics import GROUPS, group_of, pairwise_accuracy, summarise
from edit_tools import TASKS, edit_lines, results, share, typed

from paco_eval.engines import asking_once
from paco_eval.errors import BenchError, ItemError
from paco_eval.results import ResultsFile
from paco_eval.scoring import GIVE_UP_AFTER, results_of

# ---------------------------------------------------------------- metrics

scores = st.sampled_from([0.0, 0.2, 0.5, 0.500001, 1.0])
rows_of_results = st.lists(
    st.fixed_dictionaries(
        {
            "task_type": st.sampled_from([*TASKS, "a_task_of_mine"]),
            "dimension": st.sampled_from(EDIT_DIMENSIONS),
            "scores": st.tuples(scores, scores),
        }
    ),
    max_size=60,
)


@given(rows_of_results)
def test_accuracies_of_random_results(rows):
    summaries = summarise(rows)
    assert set(summaries) == {row["dimension"] for row in rows}
    for dimension, summary in summaries.items():
        mine = [row for row in rows if row["dimension"] == dimension]
        assert set(summary.tasks) == {row["task_type"] for row in mine}
        for lenient, kind in ((False, "strict"), (True, "lenient")):
            for task, found in summary.tasks.items():
                assert getattr(found, kind) == share([row for row in mine if row["task_type"] == task], lenient)
            for group, found in summary.groups.items():
                members = [row for row in mine if row["task_type"] in GROUPS.get(group, ("a_task_of_mine",))]
                assert getattr(found, kind) == share(members, lenient) and found.pairs == len(members)
            assert getattr(summary.average, kind) == share(mine, lenient)
            by_task = [share([row for row in mine if row["task_type"] == task], lenient) for task in summary.tasks]
            assert summary.task_mean[lenient] == pytest.approx(sum(by_task) / len(by_task))
        assert summary.average.ties == sum(row["scores"][0] == row["scores"][1] for row in mine)
        assert sum(one.pairs for one in summary.groups.values()) == summary.average.pairs == len(mine)


def test_groups_are_the_published_ones():
    assert len(TASKS) == len(set(TASKS)) == 13
    assert [group_of(task) for task in ("subject-add", "tone_transfer", "extract", "compose", "new")] == [
        *("object", "appearance", "scene", "advanced", "other")
    ]
    with pytest.raises(ValueError, match="no pairs"):
        pairwise_accuracy([])


def test_scores_are_the_judges_answers(judged, examples, toy_judge, tmp_path):
    """Each score against the toy judge asked directly: batches and memory change nothing."""
    assert judged() == 0
    rows = results(tmp_path)
    assert [row["index"] for row in rows] == list(range(len(examples)))
    questions = (editing_instruction_question, editing_consistency_question)
    for row, example in zip(rows, examples):
        assert row["key"] == example["key"] and row["engine"] == "transformers"
        before, edits = example["input_image"], example["output_images"]
        direct = toy_judge([Pair(before, edit, ask(example["instruction"])) for edit in edits for ask in questions])
        for edit, score in enumerate(row["scores"]):
            follows, stays = (verdict.p_yes for verdict in direct[2 * edit : 2 * edit + 2])
            expected = {"prompt_following": follows, "consistency": stays, "overall": np.sqrt(follows * stays)}
            assert score == pytest.approx(expected[example["dimension"]], abs=1e-5)
    assert len({tuple(row["scores"]) for row in rows}) == len(rows)  # the judge tells edits apart
    # 20 rows are about 7 times two edits, each asked two questions once (`overall` asks what its neighbours asked).
    assert sum(judged.asked) == 7 * 2 * 2


def test_a_second_run_asks_nothing(judged, tmp_path):
    assert judged() == 0
    first, asked = results(tmp_path), list(judged.asked)
    assert judged() == 0
    assert results(tmp_path) == first and judged.asked == asked


# ---------------------------------------------------------------- resuming


def test_a_stopped_run_continues(judged, tmp_path, capsys):
    assert judged(stop_after=2) == 130
    assert "the same command continues" in capsys.readouterr().err
    file = tmp_path / "results" / "judge.jsonl"
    early = results(tmp_path)
    assert 0 < len(early) < 20
    file.write_bytes(file.read_bytes() + b'{"model": "some/judge", "index": 1')  # cut off while writing
    assert judged() == 0
    rows = results(tmp_path)
    assert rows[: len(early)] == early and [row["index"] for row in rows] == list(range(20))


@pytest.mark.slow
def test_a_killed_run_continues_with_the_command_as_typed(answering_judge, data, judged, tmp_path):
    """SIGKILL between rows, the same command again: every row once, as a run that was not killed has them."""
    assert judged() == 0
    whole = results(tmp_path)
    arguments = ["--model", answering_judge, "--engine", "transformers", "--dataset", data, "--batch_size", "1"]
    arguments += ["--results_dir", tmp_path / "typed", "--output", tmp_path / "typed_summary"]
    file = tmp_path / "typed" / "judge.jsonl"
    first = typed(*arguments)
    deadline = time.monotonic() + 280
    while not (file.exists() and file.read_bytes().count(b"\n") >= 3):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[0][-2000:]
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    kept = file.read_bytes()
    again = typed(*arguments)
    output = again.communicate(timeout=280)[0]
    assert again.returncode == 0, output[-2000:]
    assert file.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(20))
    for row, other in zip(rows, whole):
        assert row["scores"] == pytest.approx(other["scores"], abs=1e-5)
    assert "20/20 items" in output and (tmp_path / "typed_summary.txt").read_text() in output


def test_two_runs_do_not_write_one_file(answering_judge, judged, tmp_path, capsys):
    assert judged(stop_after=1) == 130
    identities = {(row["index"], *row["key"], row["dimension"]) for row in results(tmp_path)}
    with ResultsFile(tmp_path / "results" / "judge.jsonl", str(answering_judge), identities, evaluation.row_identity):
        assert judged() == 2
    assert "another run is writing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda row: {**row, "model": "other/judge"}, "line 1 is of model other/judge; move the file away"),
        (lambda row: {**row, "key": ["x", "y"]}, "line 1 is of item 0 x y prompt_following of another benchmark"),
        (lambda row: {"model": row["model"]}, "line 1 is not a result of this benchmark"),
    ],
    ids=["model", "item", "line"],
)
def test_results_that_do_not_belong_are_not_mixed(judged, tmp_path, capsys, change, said):
    assert judged(stop_after=1) == 130
    file = tmp_path / "results" / "judge.jsonl"
    lines = file.read_text().splitlines()
    before = "\n".join([json.dumps(change(json.loads(lines[0]))), *lines[1:]]) + "\n"
    file.write_text(before)
    assert judged() == 2
    assert said in capsys.readouterr().err and file.read_text() == before


# ---------------------------------------------------------------- broken rows


def test_broken_rows_are_reported_by_their_key_and_the_run_goes_on(judged, data, tmp_path, capsys):
    (data.parent / "images" / "4_a.png").write_bytes(b"no picture")
    (data.parent / "images" / "5_in.png").unlink()
    whole = (data.parent / "images" / "6_b.png").read_bytes()
    (data.parent / "images" / "6_b.png").write_bytes(whole[: len(whole) // 2])
    edit_lines(
        data,
        {
            8: lambda row: {**row, "dimension": "beauty"},
            9: lambda row: {**row, "output_images": row["output_images"][:1]},
            10: lambda row: {**row, "instruction": "  "},
            11: lambda row: {name: value for name, value in row.items() if name != "task_type"},
            12: '{"key": ["edit40a"',
            13: lambda row: {**row, "key": "edit40a"},
            14: lambda row: {**row, "input_image": None},
        },
    )
    assert judged() == 1
    said = capsys.readouterr().err
    for line in (
        "row 4 [edit10a, edit10b] consistency: image output_images[0]",
        "row 5 [edit10a, edit10b] overall: image input_image",
        "row 6 [edit20a, edit20b] prompt_following: image output_images[1]",
        "row 8 [edit20a, edit20b] beauty: broken row: there is no editing dimension 'beauty'",
        "row 9 [edit30a, edit30b] prompt_following: output_images must hold 2 images, the better first, not 1 images",
        "row 10 [edit30a, edit30b] consistency: broken row: instruction must be a text, not '  '",
        "row 11 [edit30a, edit30b] overall: broken row: has no 'task_type'",
        "row 12: broken row: ",
        "row 13 edit40a consistency: broken row: key must name two edits",
        "row 14 [edit40a, edit40b] overall: input_image holds no image but None",
        "rows without a result: 10, named above",
    ):
        assert line in said
    good = [0, 1, 2, 3, 7, *range(15, 20)]
    assert [row["index"] for row in results(tmp_path)] == good
    assert (tmp_path / "summary.txt").exists()

    (data.parent / "images" / "6_b.png").write_bytes(whole)  # repaired: the same command adds it
    assert judged() == 1 and [row["index"] for row in results(tmp_path)] == [*good, 6]


def test_a_row_that_the_engine_dislikes_does_not_take_its_batch_along(judged, data, tmp_path, capsys):
    """A picture of 1 x 300 pixels: the real processor of Qwen2.5-VL refuses such a shape."""
    Image.new("RGB", (300, 1)).save(data.parent / "images" / "7_b.png")
    assert judged("--batch_size", "16") == 1
    said = capsys.readouterr().err
    assert "row 7 [edit20a, edit20b] consistency: the engine failed: ValueError: absolute aspect ratio" in said
    assert "rows without a result: 1, named above" in said
    assert [row["index"] for row in results(tmp_path)] == [index for index in range(20) if index != 7]


def test_an_engine_that_always_fails_ends_the_run():
    def engine(pairs):
        raise RuntimeError("CUDA error: device-side assert\nlong explanation")

    image = Image.new("RGB", (8, 8))
    found = []
    with pytest.raises(
        BenchError, match=f"failed on {GIVE_UP_AFTER} items in a row.*RuntimeError: CUDA error.*assert$"
    ):
        found.extend(results_of(range(99), lambda item: ([Pair(image, image, "same?")], dict), engine, 4))
    with pytest.raises(ValueError, match="a mistake of ours"):  # what makes the row is not the engine
        list(results_of([1], lambda item: ([], lambda values: int("a mistake of ours")), lambda pairs: [], 4))


def test_items_keep_their_own_verdicts():
    """Items of 0 to 3 pairs, some without a score, in batches of any size: each gets what its own questions give."""
    image = Image.new("RGB", (8, 8))
    sizes = [3, 0, 1, 2, 2, 1, 3]

    def prepare(item):
        if item == 5:
            raise ItemError("broken")
        return [Pair(image, image, f"{item}.{i}") for i in range(sizes[item])], lambda values: {"values": values}

    def engine(pairs):
        texts = [pair.question for pair in pairs]
        return [Verdict(None, "no score") if text == "3.1" else Verdict(float(text) / 10) for text in texts]

    for batch_size in range(1, 9):
        found = {item: row for item, row in results_of(range(7), prepare, engine, batch_size)}
        assert sorted(found) == list(range(7))
        assert str(found[5]) == "broken" and str(found[3]) == "no score"
        for item in (0, 1, 2, 4, 6):
            assert found[item] == {"values": [float(f"{item}.{i}") / 10 for i in range(sizes[item])]}


def test_a_missing_score_is_asked_again_and_a_known_one_is_not():
    asked = []

    def engine(pairs):
        asked.extend(pair.question for pair in pairs)
        return [Verdict(None, "busy") if pair.question == "b" else Verdict(0.25) for pair in pairs]

    one, same, other = Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "red")
    score = asking_once(engine)
    pairs = [Pair(one, other, "a"), Pair(same, other, "a"), Pair(other, one, "a"), Pair(one, other, "b")]
    assert [verdict.ok for verdict in score(pairs)] == [True, True, True, False] and asked == ["a", "a", "b"]
    assert [verdict.ok for verdict in score(pairs)] == [True, True, True, False] and asked == ["a", "a", "b", "b"]
