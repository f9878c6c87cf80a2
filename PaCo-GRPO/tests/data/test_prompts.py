"""Prompt sets become items; errors name file, line and field."""

import gzip
import json
import textwrap

import pytest

from paco_grpo.data.prompts import load_prompts, read_items
from paco_grpo.data.sets import fingerprint_sets, has_references, prompt_sets
from paco_grpo.options import RunOptions
from paco_grpo.options.schema import DatasetOptions
from paco_judge.errors import UserError

GRID = "1x2 grid of a cat. [LEFT]: asleep. [RIGHT]: awake."


def write(folder, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "train_metadata.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def test_items_carry_their_row(tmp_path):
    row = {
        "prompt": GRID,
        "height": 64,
        "width": 128,
        "idx": "7",
        "open": True,
        "category": "cats",
        "criteria": {"style": {"a": "same", "b": None}},
    }
    plain = {"prompt": "one picture of a red 4x4 truck", "open": None, "category": None}
    items = load_prompts(write(tmp_path, row, b"", plain), "train")
    assert [(item.item_id, item.height, item.width) for item in items] == [
        (0, 64, 128),
        (1, None, None),
    ]
    assert [item.metadata for item in items] == [row, plain]


def test_a_line_of_a_text_is_a_prompt(tmp_path):
    text = "\ufeffa cat\r\n\n a\u2028dog\x0cand\x85more \n"  # only line feeds end a line
    (tmp_path / "test.txt").write_bytes(text.encode())
    prompts = [item.prompt for item in load_prompts(tmp_path, "test", "general_ocr")]
    assert prompts == ["a cat", "a\u2028dog\x0cand\x85more"]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("genevl", "prompt_fn='genevl' is unknown. Did you mean 'geneval'"),
        ("my_format:none", "prompt_fn='my_format:none' cannot be imported"),
    ],
)
def test_a_kind_is_a_name_or_a_function_of_your_own(kind, problem, tmp_path, monkeypatch):
    code = """
    def rows(folder, split):
        for number in range(2):
            yield make_item(number, {"prompt": f"{folder.name} {split} {number}"}, "here")
    """
    text = "from paco_grpo.data.prompts import make_item\n" + textwrap.dedent(code)
    (tmp_path / "my_format.py").write_text(text + "rows.has_references = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "set").mkdir()
    items = load_prompts(tmp_path / "set", "test", "my_format:rows")
    assert [item.prompt for item in items] == ["set test 0", "set test 1"]
    for name, has in (("my_format:rows", True), ("text", False), ("geneval_image", True)):
        assert has_references(RunOptions(prompt_fn=name)) == has
    with pytest.raises(UserError, match=problem):
        load_prompts(tmp_path / "set", "test", kind)


ROWS = [{"prompt": "a fox", "seed": 3}, {"prompt": "an owl"}]
LINES = "\n".join(map(json.dumps, ROWS)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.JSONL", LINES),
        ("p.txt", b"\xef\xbb\xbf" + LINES),
        ("p.json", json.dumps(ROWS, indent=1).encode()),
        ("p.Json", LINES),
        ("p", json.dumps(["a fox", {"prompt": "an owl"}]).encode()),
        ("p.TXT", b"a fox\r\nan owl"),
    ],
)
def test_files_of_prompts(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    items = read_items(tmp_path / name, with_images=False)
    assert [(item.item_id, item.prompt) for item in items] == [(0, "a fox"), (1, "an owl")]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("p.csv", b"prompt,seed\na fox,3", ".parquet"),
        ("p.jsonl.gz", gzip.compress(LINES, mtime=0), ".parquet"),
        ("p", "a fox".encode("utf-16"), "UTF-8"),
        ("p.txt", b"[LEFT] a fox", "JSON.*may not begin"),
        ("p.txt", json.dumps(ROWS, indent=1).encode()[:-1] + b",]", "JSON.*may not begin"),
        ("p.json", b'["a fox", 5]', "row 2.*5"),
        ("p.json", b'{"prompts": ["a fox"]}', "row 1: field prompt"),
    ],
)
def test_files_of_something_else(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{named}"):
        read_items(tmp_path / name, with_images=False)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "x", "height": 64}, "'height' and 'width'"),
        ({"prompt": "x", "open": "false"}, "open.*'false'"),
        ({"prompt": "x", "criteria": {"style": {"a": 1}}}, "criteria"),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, row, named):
    write(tmp_path, {"prompt": GRID}, row)
    with pytest.raises(UserError, match=f"train_metadata.jsonl: row 2.*field.*{named}"):
        load_prompts(tmp_path, "train")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (b"{not json", "line 2"),
        ({"prompt": GRID.replace("1x2", "2x2"), "idx": "0040"}, "row 2 .*item '0040'.*2x2"),
    ],
)
def test_other_errors_name_file_and_place(tmp_path, row, named):
    with pytest.raises(UserError, match=f"train_metadata.jsonl.*{named}"):
        load_prompts(write(tmp_path, {"prompt": GRID}, row), "train")


def test_code_that_reads_a_set_is_part_of_its_identity(tmp_path, monkeypatch):
    """Of one or several sets, in a module or a file; a format of ours counts by its files alone."""
    folder = write(tmp_path, {"prompt": GRID})
    for name, scale in (("one_reader", 2), ("two_reader", 3)):
        (tmp_path / f".{name}").mkdir()
        code = f"def rows(folder, split): return [{scale}]\ndef others(folder, split): return []"
        (tmp_path / f".{name}" / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path / f".{name}")
    kinds = ["geneval", "one_reader:rows", "one_reader:others", "two_reader:rows"]
    identities = {kind: fingerprint_sets(sets_of(folder, kind)) for kind in kinds}
    of_two = {kind: fingerprint_sets(sets_of(folder, kind, "text")) for kind in kinds}
    assert len(set(identities.values())) == len(set(of_two.values())) == 4
    file = tmp_path / ".one_reader" / "one_reader.py"
    assert fingerprint_sets(sets_of(folder, f"{file}:rows")) == identities["one_reader:rows"]
    file.write_text(f"{file.read_text()}\n")
    for kind in kinds:
        changed = kind.startswith("one_reader")
        assert (fingerprint_sets(sets_of(folder, kind)) != identities[kind]) == changed
        assert (fingerprint_sets(sets_of(folder, kind, "text")) != of_two[kind]) == changed


def sets_of(folder, kind, second=None):
    """The sets of options with one folder, or with two that have its files."""
    if second is None:
        return prompt_sets(RunOptions(dataset=str(folder), prompt_fn=kind))
    tables = {
        "a": DatasetOptions(folder=str(folder), prompt_fn=kind),
        "b": DatasetOptions(folder=str(folder), prompt_fn=second),
    }
    return prompt_sets(RunOptions(datasets=tables))
