"""Editing sets: instructions with reference images, from files next to a jsonl or from Arrow and
Parquet tables.
"""

import io
import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from paco_grpo.data import prompts
from paco_grpo.data.prompts import load_prompts, read_items
from paco_grpo.training.references import check_headers, stored_images
from paco_judge.errors import UserError

COLORS = ["red", "lime", "blue", "white", "black"]


def encoded(color, kind="PNG", size=(12, 8), **more) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format=kind, **more)
    return buffer.getvalue()


RED = encoded("red")
BLUE = encoded("blue")


def write_jsonl(folder, *rows):
    cut = encoded("red", "JPEG", size=(64, 64))[:-40]
    for name, data in (("a.png", RED), ("b.png", BLUE), ("cut.jpg", cut)):
        (folder / name).write_bytes(data)
    (folder / "train_metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write(path, form="stream", **columns):
    data = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(data, path, row_group_size=2)
        return
    new, _, compression = form.partition(" ")
    new = pa.ipc.new_file if new == "file" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression=compression or None)
    with pa.OSFile(str(path), "wb") as sink, new(sink, data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=2)


def corner(image):
    return image.getpixel((0, 0))


@pytest.mark.parametrize("name", ["c.png", "cut.jpg"])  # the second is found when it is read
def test_geneval_image(tmp_path, name):
    good = {"prompt": "the 2x2 tiles", "image": "a.png", "height": 64, "width": 32}
    (item,) = load_prompts(write_jsonl(tmp_path, good), "train", "geneval_image")
    assert (item.prompt, item.height, item.width) == ("the 2x2 tiles", 64, 32)
    assert (item.image.mode, item.image.size, corner(item.image)) == ("RGB", (12, 8), (255, 0, 0))
    write_jsonl(tmp_path, good, {"prompt": "x", "image": name})
    with pytest.raises(UserError, match=rf"train_metadata.jsonl: row 2: field 'image' .*{name}"):
        _ = [item.image for item in load_prompts(tmp_path, "train", "geneval_image")]


@pytest.mark.parametrize("form", ["stream", "file", "stream zstd", "file lz4", "parquet"])
def test_arrow_editing(tmp_path, form):
    """Images as ``datasets`` saves them, or as bytes, which Polars calls large."""
    suffix = "parquet" if form == "parquet" else "arrow"
    images = [encoded(color) for color in COLORS]
    saved = [{"bytes": data, "path": None} for data in images]
    write(
        tmp_path / f"test.{suffix}",
        form,
        prompt=pa.array(COLORS, pa.large_string()),
        image=saved if form.startswith("stream") else pa.array(images, pa.large_binary()),
        category=pa.array(list("abcde")).dictionary_encode(),
        note=[1, 2, 3, None, 5],
        edit_box=[[0, 0.5, 1, number / 5] for number in range(5)],
        criteria=[{"Style": {"a": "same?"}}, *[{"Style": None}] * 4],
        day=[date(2026, 11, day) for day in range(1, 6)],
    )
    items = load_prompts(tmp_path, "test", "arrow_editing")
    found = [(item.item_id, item.prompt, item.metadata["category"]) for item in items]
    assert found == list(zip(range(5), COLORS, "abcde", strict=True))
    for item, data in zip(items, images, strict=True):
        assert item.metadata.keys() == {"prompt", "category", "note", "edit_box", "criteria"}
        assert item.metadata["edit_box"] == [0, 0.5, 1, item.item_id / 5]
        assert item.image.tobytes() == Image.open(io.BytesIO(data)).tobytes()
    drawn = read_items(tmp_path / f"test.{suffix}", with_images=False)
    assert [(i.prompt, i.metadata, i.num_references) for i in drawn] == [
        (i.prompt, i.metadata, 0) for i in items
    ]


def two_colors() -> bytes:
    """12x8 pixels: red, and blue from the fourth column and second row on."""
    image = Image.new("RGB", (12, 8), "red")
    image.paste("blue", (3, 1, 12, 8))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["jsonl", "arrow", "parquet"])
def test_references_are_cut_to_their_boxes(tmp_path, suffix):
    boxes = [[0.25, 0.125, 0.75, 1], None]
    if suffix == "jsonl":
        first = {"prompt": "x", "images": ["c.png", "a.png"], "reference_boxes": boxes}
        second = {"prompt": "y", "image": "b.png", "reference_boxes": [[0, 0.3, 0.01, 0.31]]}
        write_jsonl(tmp_path, first, second, {"prompt": "z", "image": "c.png"})
        (tmp_path / "c.png").write_bytes(two_colors())
    else:
        write(
            tmp_path / f"train.{suffix}",
            prompt=["x", "y", "z"],
            images=[[two_colors(), RED], [BLUE], [two_colors()]],
            reference_boxes=[boxes, [[0, 0.3, 0.01, 0.31]], None],
        )
    kind = "geneval_image" if suffix == "jsonl" else "arrow_editing"
    several, small, whole = load_prompts(tmp_path, "train", kind)
    part, red = several.load().crops
    assert (part.size, part.getcolors()) == ((6, 7), [(42, (0, 0, 255))])
    assert (red, several.images[0].size) == (several.images[1], (12, 8))
    assert small.crops[0].size == (1, 1)
    loaded = whole.load()
    assert loaded.crops[0] is loaded.image


@pytest.mark.parametrize(
    "boxes",
    [
        [[0.5, 0, 0.5, 1]],
        [[-0.1, 0, 1, 1]],
        [[0, 0.2, 1, 1.01]],
        [[3, 1, 12, 8]],
        [[0, 1, 1, 0]],
        [[0, 0, 1]],
        [None, None],
        [0, 0, 1, 1],
    ],
)
def test_a_box_that_is_not_inside_its_image_is_refused(tmp_path, boxes):
    row = {"prompt": "x", "image": "a.png", "reference_boxes": boxes}
    write_jsonl(tmp_path, row | {"reference_boxes": [None]}, row)
    with pytest.raises(UserError, match=r"row 2: field '?reference_boxes") as error:
        load_prompts(tmp_path, "train", "geneval_image")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"prompt": ["x"]}, "column 'image' is missing"),
        ({"prompt": ["x", "y"], "images": [[RED], [RED, None]]}, "row 2: field 'images'"),
    ],
)
def test_arrow_errors_name_file_row_and_field(tmp_path, columns, named):
    write(tmp_path / "train.arrow", **columns)
    with pytest.raises(UserError, match=rf"train.arrow: {named}"):
        _ = [item.images for item in load_prompts(tmp_path, "train", "arrow_editing")]


@pytest.mark.parametrize("form", ["stream", "file", "stream zstd", "file lz4"])
def test_a_damaged_table_is_named(tmp_path, form):
    """Empty, cut anywhere, or with bytes in the middle that are not its own."""
    file = tmp_path / "train.arrow"
    columns = {"prompt": [f"{n} more" for n in range(40)], "image": [RED] * 40}
    write(file, form, **columns)
    whole = file.read_bytes()
    damaged = [b"", whole[:4], whole[: len(whole) // 3], whole[: len(whole) // 2 + 3], b"x" * 999]
    middle = len(whole) // 2
    damaged.append(whole[:middle] + b"\xff" * 200 + whole[middle + 200 :])
    for content in damaged:
        file.write_bytes(content)
        with pytest.raises(UserError, match="train.arrow") as error:
            _ = [item.images for item in load_prompts(tmp_path, "train", "arrow_editing")]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize("saved", [True, False])
def test_headers_of_images_are_checked_without_the_rest(tmp_path, suffix, saved):
    """A cut image is found when it is read."""
    cut = encoded("red", "JPEG", size=(64, 64))[:-40]
    contents = [RED, b"", cut, b"GIF89a", None]
    column = [{"bytes": data, "path": None} for data in contents] if saved else contents
    write(tmp_path / f"train.{suffix}", prompt=list("abcde"), image=column)
    items = load_prompts(tmp_path, "train", "arrow_editing")
    with pytest.raises(UserError) as refused:
        check_headers(stored_images(items))
    rows = [line.partition(": field")[0] for line in str(refused.value).splitlines()]
    assert rows == [f"{tmp_path}/train.{suffix}: row {number}" for number in (2, 4, 5)]
    good, _, damaged, *_ = stored_images(items)
    assert corner(good()) == (255, 0, 0)
    with pytest.raises(UserError, match="row 3"):
        damaged()


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_a_table_without_rows_is_named(tmp_path, suffix):
    write(
        tmp_path / f"train.{suffix}", prompt=pa.array([], pa.string()), image=pa.array([], "binary")
    )
    with pytest.raises(UserError, match="train"):
        load_prompts(tmp_path, "train", "arrow_editing")


def test_several_images_keep_their_order_and_are_read_when_they_are_used(tmp_path, monkeypatch):
    write_jsonl(
        tmp_path,
        {"prompt": "x", "images": ["b.png", "a.png"]},
        {"prompt": "y", "images": ["a.png"]},
    )
    write(tmp_path / "test.arrow", prompt=["x", "y"], images=[[BLUE, RED], [RED]])
    for split, kind in (("train", "geneval_image"), ("test", "arrow_editing")):
        with monkeypatch.context() as patch:
            patch.setattr(prompts, "read_image", None)
            first, second = load_prompts(tmp_path, split, kind)
        assert [corner(image) for image in first.images] == [(0, 0, 255), (255, 0, 0)]
        assert second.num_references == 1 and corner(second.image) == (255, 0, 0)
