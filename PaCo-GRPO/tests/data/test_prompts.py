"""Prompt sets become items; errors name file, line and field."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.data.prompts import DataError, item_size, load_prompts, round_to_multiple
from paco_grpo.types import Item

GRID = "1x2 grid of a cat. [LEFT]: asleep. [RIGHT]: awake."
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "t2is_sample.jsonl"


def write(folder, *rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (folder / "train_metadata.jsonl").write_text(text)
    return folder


def test_items_carry_their_row(tmp_path):
    row = {
        "prompt": GRID,
        "height": 64,
        "width": 128,
        "layout": "1x2",
        "idx": "7",
        "criteria": {"style": {"a": "same"}},
    }
    items = load_prompts(write(tmp_path, row, "", {"prompt": "one picture"}), "train")
    assert [item.item_id for item in items] == [0, 1]
    assert (items[0].height, items[0].width, items[0].metadata["idx"]) == (64, 128, "7")
    assert (items[1].height, items[1].width) == (None, None)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{not json", "column 2"),
        ("[1]", "list"),
        ({"text": "x"}, "field 'prompt'"),
        ({"prompt": "  "}, "field 'prompt'"),
        ({"prompt": "x", "height": 64}, "'height' and 'width'"),
        ({"prompt": "x", "height": "64", "width": 64}, "'height'.*'64'"),
        ({"prompt": "x", "height": 64, "width": 0}, "'width'"),
        ({"prompt": "x", "category": {"a": 1}}, "field 'category'"),
        ({"prompt": "x", "criteria": {"style": "same"}}, "field 'criteria'"),
        ({"prompt": GRID.replace("1x2", "2x2"), "idx": "0040"}, "item '0040'.*2x2"),
        ({"prompt": GRID, "layout": "2x1"}, "'layout'.*2x1.*1x2"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, row, named):
    with pytest.raises(DataError, match=rf"train_metadata.jsonl:2.*{named}"):
        load_prompts(write(tmp_path, {"prompt": GRID}, row), "train")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "\xff"}', r"not UTF-8 \(byte 0xff\)"),
        (b'{"prompt": ' + b"[" * 100_000, "not JSON"),
        (b'{"prompt": "a\\u0000b"}', "field 'prompt'"),
        (b'{"prompt": "x", "height": 1' + b"0" * 400 + b', "width": 1}', "field 'height' must be an integer from 1 to"),
        (b'{"prompt": "x", "criteria": {"a": [1]}}', "field 'criteria'"),
    ],
)
def test_a_damaged_line_is_one_sentence(tmp_path, line, said):
    (tmp_path / "train_metadata.jsonl").write_bytes(json.dumps({"prompt": GRID}).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"train_metadata.jsonl:3.*{said}") as caught:
        load_prompts(tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": GRID}).encode())
    (tmp_path / "train.txt").write_bytes(b"\xef\xbb\xbfa cat\r\n")
    assert [load_prompts(tmp_path, "train", kind)[0].prompt for kind in ("geneval", "text")] == [GRID, "a cat"]
    (tmp_path / "train.txt").write_bytes("a cat\na dog".encode("utf-16-le"))
    with pytest.raises(DataError, match="train.txt: not a text .*save it as UTF-8"):
        load_prompts(tmp_path, "train", "text")


def test_missing_things_are_named(tmp_path):
    with pytest.raises(DataError, match="config.dataset"):
        load_prompts(tmp_path / "none", "train")
    with pytest.raises(DataError, match="train_metadata.jsonl"):
        load_prompts(tmp_path, "train")
    with pytest.raises(DataError, match="train split"):
        load_prompts(write(tmp_path), "train")


def test_text_kind(tmp_path):
    (tmp_path / "test.txt").write_text("a cat\n\n a dog \n")
    assert [item.prompt for item in load_prompts(tmp_path, "test", "general_ocr")] == ["a cat", "a dog"]


@pytest.mark.skipif(not SHARED.is_file(), reason="shared/data absent")
def test_real_items_are_accepted(tmp_path):
    (tmp_path / "train_metadata.jsonl").write_text(SHARED.read_text())
    items = load_prompts(tmp_path, "train")
    assert len(items) == len([line for line in SHARED.read_text().splitlines() if line.strip()])


def test_sizes():
    wide, free = Item(0, "x", height=512, width=1536), Item(1, "x")
    assert item_size(wide, 64, "exact") == (512, 1536)
    assert item_size(free, 64, "exact") == item_size(free, 64, "aspect") == (64, 64)
    assert round_to_multiple(item_size(wide, 512, "aspect"), 16) == (288, 880)


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(16, 2048), st.sampled_from([8, 16, 32]))
def test_aspect_keeps_shape_and_area(height, width, resolution, multiple):
    size = item_size(Item(0, "x", height, width), resolution, "aspect")
    rounded = round_to_multiple(size, multiple)
    assert all(side % multiple == 0 and side >= multiple for side in rounded)
    assert all(abs(a - b) <= max(multiple / 2, multiple - min(size)) for a, b in zip(rounded, size, strict=True))
    assert abs(size[0] * width - size[1] * height) <= max(height, width)  # rounded to whole pixels
