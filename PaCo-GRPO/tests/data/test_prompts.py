"""Prompt sets become items; errors name file, line and field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.data.prompts import DataError, item_size, load_prompts, round_to_multiple
from paco_grpo.types import Item

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
        "criteria": {"style": {"a": "same"}},
    }
    items = load_prompts(write(tmp_path, row, b"", {"prompt": "one picture"}), "train")
    assert [(item.item_id, item.height, item.width) for item in items] == [
        (0, 64, 128),
        (1, None, None),
    ]
    assert items[0].metadata == row
    (tmp_path / "test.txt").write_bytes(
        b"\xef\xbb\xbfa cat\r\n\n a dog \n"
    )  # a byte order mark is accepted
    assert [item.prompt for item in load_prompts(tmp_path, "test", "general_ocr")] == [
        "a cat",
        "a dog",
    ]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (b"{not json", ""),
        ({"prompt": "  "}, "field 'prompt'"),
        ({"prompt": "x", "height": 64}, "'height' and 'width'"),
        ({"prompt": "x", "height": "64", "width": 64}, "'height'.*'64'"),
        ({"prompt": "x", "category": {"a": 1}}, "field 'category'"),
        ({"prompt": "x", "criteria": {"style": "same"}}, "field 'criteria'"),
        ({"prompt": GRID.replace("1x2", "2x2"), "idx": "0040"}, "item '0040'.*2x2"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, row, named):
    with pytest.raises(DataError, match=rf"train_metadata.jsonl:2.*{named}"):
        load_prompts(write(tmp_path, {"prompt": GRID}, row), "train")


@given(
    st.integers(1, 4000), st.integers(1, 4000), st.integers(16, 2048), st.sampled_from([8, 16, 32])
)
def test_aspect_keeps_shape_and_area(height, width, resolution, multiple):
    item = Item(0, "x", height, width)
    assert item_size(item, resolution, "exact") == (height, width)
    assert item_size(Item(1, "x"), resolution, "aspect") == (resolution, resolution)
    size = item_size(item, resolution, "aspect")
    rounded = round_to_multiple(size, multiple)
    assert all(side % multiple == 0 and side >= multiple for side in rounded)
    assert all(
        abs(a - b) <= max(multiple / 2, multiple - min(size))
        for a, b in zip(rounded, size, strict=True)
    )
    assert abs(size[0] * width - size[1] * height) <= max(height, width)  # rounded to whole pixels
