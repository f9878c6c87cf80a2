"""Files that users and crashes damage, full disks, odd keys: one sentence with file and line, and nothing lost."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import bench_tools  # noqa: F401 - finds the benchmarks
import print_eval_table
import pytest
from calculate_statistics import parse_row as parse_edit_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paco_eval.results import BenchError, ResultsFile, read_jsonl, read_results
from paco_reward import cli
from paco_reward.datasets import load_examples
from paco_reward.errors import PacoRewardError, writing
from paco_reward.pairing import inputs
from paco_reward.pairing.answers import Journal
from paco_reward.pairing.outputs import write_json
from paco_reward.pairing.records import PromptItem
from paco_reward.server import api_key

DAMAGED = [b"\xff", b"[" * 100_000, b"1" * 5000, b"\0\0", b"[1]", b"{"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FILES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of(**fields):
    """Bytes, or rows of any JSON that often have these fields."""
    return st.binary(max_size=60) | st.lists(
        JSON | st.fixed_dictionaries({name: JSON | value for name, value in fields.items()}), max_size=3
    )


def write(file: Path, content) -> Path:
    file.write_bytes(content if isinstance(content, bytes) else "\n".join(map(json.dumps, content)).encode() + b"\n")
    return file


# ---------------------------------------------------------------- PaCo-Reward's data


def data_set(folder, content: bytes, info=None) -> Path:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    own = {"file_name": "own.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"own": own if info is None else info}))
    write(folder / "own.jsonl", content)
    return folder


TURNS = [{"role": "user", "content": "<image>same?"}, {"role": "assistant", "content": "Yes"}]
ROW = {"messages": TURNS, "images": ["a.png"]}


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_a_data_set(tmp_path, line):
    content = json.dumps(ROW).encode() + b"\n" + line + b"\n"
    with pytest.raises(PacoRewardError, match=r"own.jsonl line 2 cannot be read|own row 1") as caught:
        load_examples(data_set(tmp_path, content), "own")
    assert "\n" not in str(caught.value)
    (tmp_path / "dataset_info.json").write_bytes(line)
    with pytest.raises(PacoRewardError, match=r"dataset_info.json"):
        load_examples(tmp_path, "own")


def test_a_byte_order_mark_is_accepted(tmp_path):
    folder = data_set(tmp_path, b"\xef\xbb\xbf" + json.dumps(ROW).encode())
    (folder / "dataset_info.json").write_bytes(b"\xef\xbb\xbf" + (folder / "dataset_info.json").read_bytes())
    assert load_examples(folder, "own")[0].answer == "Yes"
    assert inputs.read_json_lines(folder / "own.jsonl", "rows")[0][1] == ROW


@FILES
@given(rows_of(messages=st.just(TURNS) | st.lists(st.dictionaries(st.sampled_from(["role", "content"]), JSON)),
               images=st.lists(st.text(max_size=3) | st.just("a" * 5000), max_size=2)), st.none() | JSON)  # fmt: skip
def test_any_data_set_is_read_or_one_error(tmp_path, content, info):
    try:
        examples = load_examples(data_set(tmp_path, content, info), "own")
    except PacoRewardError as error:
        assert "\n" not in str(error)
        return
    assert examples is None or all(isinstance(example.prompt, str) for example in examples)


ITEM = PromptItem(
    "p", "a", "a", 1, 1, "line 1", sources={"a.png": (Path("a.png"), None), "b.png": (Path("b.png"), None)}
)
NAMES = st.sampled_from(["a.png", "b.png", "c.png"])


@FILES
@given(st.data())
def test_any_input_of_build_dataset_is_read_or_one_error(tmp_path, data):
    file, lists = tmp_path / "lines.jsonl", st.lists(NAMES, max_size=3)
    grids = st.just("1x2 grid. [LEFT]: a. [RIGHT]: b.")
    readers = {
        "prompts": ({"prompt": grids, "idx": NAMES, "split": st.just("test"), "image": NAMES}, lambda: inputs.read_prompts(file, tmp_path, True)),
        "rankings": ({"folder": st.just("p"), "ref_image": NAMES, "rank_images": lists}, lambda: inputs.read_rankings(file, {"p": ITEM})),
        "reasons": ({"folder": st.just("p"), "images": lists, "reason": NAMES}, lambda: inputs.read_reasons(file, {"p": ITEM})),
        "edits": ({"source": NAMES, "edited": NAMES, "instruction": NAMES, "follows": JSON}, lambda: inputs.read_edits(file, True)),
    }  # fmt: skip
    fields, read = readers[data.draw(st.sampled_from(sorted(readers)))]
    write(file, data.draw(rows_of(**fields)))
    try:
        read()
    except PacoRewardError as error:
        assert str(file) in str(error) or "lines.jsonl" in str(error)


# ---------------------------------------------------------------- journals of answers


@pytest.mark.parametrize(
    "line", [*DAMAGED, b"{}", b'{"key": 1, "value": 1}', b'{"key": "b", "value": true}', b'{"key": "b", "value": 2}',
             b'{"key": "b", "value": NaN}', b'{"key": "b", "value": null}', b'{"key": ["b"], "value": "x"}', b""]
)  # fmt: skip
def test_a_damaged_line_of_a_journal_is_named_and_a_cut_one_tolerated(tmp_path, line):
    good = b'{"key": "a", "value": 0.5}\n'
    file = write(tmp_path / "work.jsonl", good + line + b"\n" + good)
    with pytest.raises(PacoRewardError, match=r"work.jsonl line 2 is damaged .*; remove this line"):
        Journal(file)
    journal = Journal(write(file, good + line))  # without the line's end: killed while writing
    assert journal.values == {"a": 0.5}
    journal.add("c", "Yes\u2028")
    assert Journal(file).values == {"a": 0.5, "c": "Yes\u2028"}


@FILES
@given(rows_of(key=st.text(max_size=3), value=st.floats(0, 1) | st.text(max_size=3)))
def test_any_journal_is_read_or_one_error(tmp_path, content):
    try:
        journal = Journal(write(tmp_path / "work.jsonl", content))
    except PacoRewardError as error:
        assert "work.jsonl line" in str(error)
        return
    journal.add("new", 0.25)
    assert Journal(tmp_path / "work.jsonl")["new"] == journal["new"]


# ---------------------------------------------------------------- results of the benchmarks


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_results_or_of_a_benchmark(tmp_path, line):
    good = b'{"model": "m", "index": 0}\n'
    file = write(tmp_path / "m.jsonl", good + line + b"\n")
    for read in (
        lambda: ResultsFile(file, "m", {(0,)}, lambda row: (row["index"],)).__enter__(),
        lambda: read_results(tmp_path, lambda row: {"index": row["index"]}, "eval_vllm.py"),
        lambda: read_jsonl(file),
    ):
        with pytest.raises(BenchError, match=r"m.jsonl line 2") as caught:
            read()
        assert "\n" not in str(caught.value)


@FILES
@given(rows_of(model=st.just("m"), index=st.integers(0, 3), dimension=st.just("overall"), metrics=JSON, task_type=JSON,
               scores=st.lists(JSON | st.floats(0, 1), max_size=2)))  # fmt: skip
def test_any_results_are_read_or_one_error(tmp_path, content):
    file = write(tmp_path / "m.jsonl", content)
    for read in (
        lambda: ResultsFile(file, "m", {(0,), (1,)}, lambda row: (row["index"],)).__enter__().__exit__(),
        lambda: read_results(tmp_path, parse_edit_row, "evaluation.py"),
        lambda: read_results(tmp_path, print_eval_table.parse_row, "eval_vllm.py"),
        lambda: read_jsonl(file),
    ):
        try:
            read()
        except (BenchError, FileNotFoundError) as error:  # an empty results file is removed
            assert "\n" not in str(error)


@pytest.mark.parametrize("odd", ["0.5", True, None, float("nan"), 10**400, [1.0]])
def test_odd_numbers_of_results_are_refused(odd):
    metrics = dict.fromkeys([*print_eval_table.METRICS, "ties"], 0.5)
    with pytest.raises(ValueError, match="tau|accuracy|number"):
        print_eval_table.parse_row({"metrics": metrics | {"accuracy": odd}})
    with pytest.raises((ValueError, TypeError)):
        parse_edit_row({"dimension": "overall", "task_type": "x", "scores": [0.5, odd]})


# ---------------------------------------------------------------- full disks


@contextmanager
def room(file: Path, more: int):
    """Files may grow to the size of ``file`` and so many bytes: a write there is cut off, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_a_benchmark_one_row_at_most(tmp_path):
    file = tmp_path / "m.jsonl"
    known = {(0,), (1,), (2,)}
    with ResultsFile(file, "m", known, lambda row: (row["index"],)) as results:
        results.append({"index": 0})
        whole = file.read_bytes()
        with room(file, 5), pytest.raises(BenchError, match="the disk is full: .* keeps its 1 results") as caught:
            results.append({"index": 1})
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    with ResultsFile(file, "m", known, lambda row: (row["index"],)) as results:
        assert results.done == {(0,)} and file.read_bytes() == whole
        results.append({"index": 1})
    assert [json.loads(line)["index"] for line in file.read_text().splitlines()] == [0, 1]


def test_a_full_disk_leaves_a_journal_whole(tmp_path):
    """Other answers of the same moment may still fit: they must not follow half a line."""
    journal = Journal(tmp_path / "work.jsonl")
    journal.add("a", 0.5)
    with room(tmp_path / "work.jsonl", 20), pytest.raises(PacoRewardError, match="the disk is full: .*work.jsonl"):
        journal.add("b", "x" * 100)
    assert "b" not in journal
    journal.add("c", 0.25)
    assert Journal(tmp_path / "work.jsonl").values == {"a": 0.5, "c": 0.25}


def test_a_full_disk_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "stats.json", {"old": 1})
    with room(tmp_path / "stats.json", 0), pytest.raises(PacoRewardError, match="stats.json cannot be written"):
        write_json(tmp_path / "stats.json", {"new": "x" * 1000})
    assert json.loads((tmp_path / "stats.json").read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["stats.json"]
    said = "^the disk is full: /dev/full cannot be written; free some space"
    with pytest.raises(PacoRewardError, match=said), writing(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_the_accuracy_is_printed_though_the_disk_is_full(judge_dir, data_dir, capsys):
    arguments = ["accuracy", "--model", str(judge_dir), "--dataset_dir", str(data_dir), "--dataset", "held_out"]
    assert cli.main([*arguments, "--max_samples", "2", "--output", "/dev/full"]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["n"] == 2
    assert shown.err.splitlines()[-1].startswith("error: the disk is full: /dev/full cannot be written")


def test_a_key_with_a_newline_names_its_variable(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    with pytest.raises(PacoRewardError, match="--api_key_env OPENAI_API_KEY: the API key has a line break") as caught:
        api_key("OPENAI_API_KEY")
    assert "secret" not in str(caught.value)
