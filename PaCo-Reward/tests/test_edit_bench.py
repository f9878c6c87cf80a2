"""EditReward-Bench: metrics against loops, the toy judge on a small data set, resuming, broken rows, tables."""

import io
import json
import os
import signal
import subprocess
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
TOY_JUDGE = HERE.parent.parent / "quickstart" / "models" / "judge"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))  # the scripts run from their own folder

import calculate_statistics
import evaluation
from edit_data import load_bench, prepare
from edit_metrics import GROUPS, group_of, pairwise_accuracy, summarise

from paco_eval.engines import asking_once, make_engine, server_engine
from paco_eval.errors import BenchError, ItemError
from paco_eval.progress import Progress
from paco_eval.results import ResultsFile
from paco_eval.scoring import GIVE_UP_AFTER, results_of

TASKS = [task for tasks in GROUPS.values() for task in tasks]
COLUMNS = ("key", "instruction", "input_image", "output_images", "task_type", "dimension")

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


def share(rows, lenient):
    right = 0
    for row in rows:
        better, worse = row["scores"]
        if better > worse or (lenient and better == worse):
            right += 1
    return right / len(rows)


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


# ---------------------------------------------------------------- a small data set


@pytest.fixture(scope="session")
def examples(tiny):
    """20 rows with images in memory: 13 task types, each dimension; rows 3n, 3n+1, 3n+2 are about the same edits."""
    rows = []
    for index in range(20):
        seed = 10 * (index // 3)
        rows.append(
            {
                "key": [f"edit{seed}a", f"edit{seed}b"],
                "instruction": f'make the "left" shape {["red", "blue", "green"][seed // 10 % 3]}',
                "input_image": tiny.picture(seed),
                "output_images": [tiny.picture(seed + 1), tiny.picture(seed + 2)],
                "task_type": TASKS[index % 13],
                "dimension": EDIT_DIMENSIONS[index % 3],
            }
        )
    return rows


def save_jsonl(rows, folder: Path) -> Path:
    """The rows as JSON lines, their images as files beside them."""
    (folder / "images").mkdir(parents=True)
    lines = []
    for index, row in enumerate(rows):
        files = [f"images/{index}_{name}.png" for name in ("in", "a", "b")]
        for file, image in zip(files, [row["input_image"], *row["output_images"]]):
            image.save(folder / file)
        lines.append(json.dumps({**row, "input_image": files[0], "output_images": files[1:]}, ensure_ascii=False))
    file = folder / "bench.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def hugging_face(rows):
    """The rows as a Hugging Face data set with its image columns."""
    import datasets

    features = datasets.Features(
        {
            "key": datasets.Sequence(datasets.Value("string")),
            "instruction": datasets.Value("string"),
            "input_image": datasets.Image(),
            "output_images": datasets.Sequence(datasets.Image()),
            "task_type": datasets.Value("string"),
            "dimension": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


@pytest.fixture
def data(examples, tmp_path):
    """The data set as JSON lines."""
    return save_jsonl(examples, tmp_path / "data")


@pytest.fixture(scope="session")
def toy_judge():
    """The quickstart's judge, loaded by the transformers engine."""
    args = evaluation.parse(["--model", str(TOY_JUDGE), "--engine", "transformers", "--batch_size", "16"])
    return make_engine(args)[1]


@pytest.fixture
def judged(monkeypatch, toy_judge, data, tmp_path):
    """Runs evaluation.py with the loaded toy judge: judged("--flag", …, stop_after=batches) -> exit status."""
    asked = []

    def run(*arguments, stop_after=None):
        def engine(pairs):
            if stop_after is not None and len(asked) - before >= stop_after:
                raise KeyboardInterrupt
            asked.append(len(pairs))
            return toy_judge(pairs)

        before = len(asked)
        monkeypatch.setattr(evaluation, "make_engine", lambda args: ("transformers", engine))
        base = ["--model", str(TOY_JUDGE), "--dataset", str(data), "--results_dir", str(tmp_path / "results")]
        return evaluation.main([*base, "--output", str(tmp_path / "summary"), "--batch_size", "4", *arguments])

    run.asked = asked
    return run


def results(tmp_path):
    text = (tmp_path / "results" / "judge.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


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


def typed(*arguments, **more):
    """The command as users type it, started in its folder; `PYTHON` is this interpreter."""
    return subprocess.Popen(
        ["bash", "evaluate_vllm_PaCoReward.sh", *map(str, arguments)],
        cwd=FOLDER,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def test_a_killed_run_continues_with_the_command_as_typed(data, judged, tmp_path):
    """SIGKILL between rows, the same command again: every row once, as a run that was not killed has them."""
    assert judged() == 0
    whole = results(tmp_path)
    arguments = ["--model", TOY_JUDGE, "--engine", "transformers", "--dataset", data, "--batch_size", "1"]
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
    assert "20/20 rows" in output and (tmp_path / "typed_summary.txt").read_text() in output


def test_two_runs_do_not_write_one_file(judged, tmp_path, capsys):
    assert judged(stop_after=1) == 130
    identities = {(row["index"], *row["key"], row["dimension"]) for row in results(tmp_path)}
    with ResultsFile(tmp_path / "results" / "judge.jsonl", str(TOY_JUDGE), identities, evaluation.row_identity):
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


def edit_lines(data, changes):
    """Change rows of the JSON lines: {index: function of the row, or text of the line}."""
    lines = data.read_text(encoding="utf-8").splitlines()
    for index, change in changes.items():
        lines[index] = change if isinstance(change, str) else json.dumps(change(json.loads(lines[index])))
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")


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


def test_data_sets_that_cannot_be_used(data, examples, tmp_path, capsys, own_cache):
    def said(dataset, *more):
        status = evaluation.main(["--model", str(TOY_JUDGE), "--dataset", str(dataset), "--engine", "transformers",
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


@pytest.fixture(scope="session")
def fake_judge():
    """The judge package's server of a few lines."""
    import importlib.util

    file = HERE.parent / "judge" / "tests" / "fake_judge.py"
    spec = importlib.util.spec_from_file_location("edit_bench_fake_judge", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
