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

from paco_eval.results import BenchError, open_results, read_results, read_rows

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


# ---------------------------------------------------------------- results of the benchmarks


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_of_results_or_of_a_benchmark(tmp_path, line):
    good = b'{"model": "m", "index": 0}\n'
    file = write(tmp_path / "m.jsonl", good + line + b"\n")
    for read in (
        lambda: open_results(file, [{"index": 0}], {"model": "m"}).__enter__(),
        lambda: read_results(tmp_path, lambda row: {"index": row["index"]}),
        lambda: read_rows(file),
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
        lambda: open_results(file, [{"index": 0}, {"index": 1}], {"model": "m"}).__enter__(),
        lambda: read_results(tmp_path, parse_edit_row),
        lambda: read_results(tmp_path, print_eval_table.parse_row),
        lambda: read_rows(file),
    ):
        try:
            read()
        except (BenchError, FileNotFoundError) as error:  # an empty results file is removed
            assert "\n" not in str(error)


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
    items = [{"index": index} for index in range(3)]
    with open_results(file, items, {"model": "m"}) as (_, append):
        append({"index": 0})
        whole = file.read_bytes()
    with room(file, 5), pytest.raises(OSError), open_results(file, items, {"model": "m"}) as (_, append):
        append({"index": 1})
    with open_results(file, items, {"model": "m"}) as (done, append):
        assert len(done) == 1 and file.read_bytes() == whole
        append({"index": 1})
    assert [json.loads(line)["index"] for line in file.read_text().splitlines()] == [0, 1]
