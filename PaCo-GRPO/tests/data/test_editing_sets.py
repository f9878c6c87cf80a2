"""Editing sets: instructions with reference images, from files next to a jsonl or from Arrow and Parquet tables."""

import dataclasses
import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from paco_grpo.data.prompts import DataError, load_prompts

COLORS = ["red", "lime", "blue", "white", "black"]


def encoded(color, kind="PNG", size=(12, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format=kind)
    return buffer.getvalue()


def write_jsonl(folder, *rows):
    (folder / "images").mkdir(exist_ok=True)
    (folder / "images" / "a.png").write_bytes(encoded("red"))
    (folder / "images" / "broken.png").write_bytes(b"not an image")
    (folder / "images" / "cut.jpg").write_bytes(encoded("red", "JPEG", size=(64, 64))[:-40])
    (folder / "images" / "a.eps").write_bytes(encoded("red", "EPS"))
    (folder / "train_metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table(images, prompts=None, **columns):
    prompts = prompts or [f"make it {color}" for color in COLORS[: len(images)]]
    return pa.table({"prompt": prompts, "image": images} | columns)


def write_arrow(path, data, batch=2):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write_table(data, max_chunksize=batch)


def write_parquet(path, data):
    pq.write_table(data, path, row_group_size=2)


def test_geneval_image(tmp_path):
    row = {"prompt": "make the 2x2 tiles blue", "image": "images/a.png", "height": 64, "width": 32, "category": "color"}
    (item,) = load_prompts(write_jsonl(tmp_path, row), "train", "geneval_image")
    assert (item.prompt, item.height, item.width, item.metadata["category"]) == (row["prompt"], 64, 32, "color")
    assert item.image.mode == "RGB" and item.image.size == (12, 8) and item.image.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"image": "images/a.png"}, "field 'prompt'"),
        ({"prompt": "x"}, "field 'image' must name a file in .*, got None"),
        ({"prompt": "x", "image": "images/b.png"}, "field 'image' must name a file in .*, got 'images/b.png'"),
        ({"prompt": "x", "image": "images/a.png", "height": 3}, "fields 'height' and 'width' must be given together"),
    ],
)
def test_geneval_image_errors_name_file_line_and_field(tmp_path, row, named):
    good = {"prompt": "x", "image": "images/a.png"}
    with pytest.raises(DataError, match=rf"train_metadata.jsonl:2: {named}"):
        load_prompts(write_jsonl(tmp_path, good, row), "train", "geneval_image")


@pytest.mark.parametrize("name", ["broken.png", "cut.jpg", "a.eps"])
def test_a_damaged_file_is_named_when_it_is_read(tmp_path, name):
    (item,) = load_prompts(
        write_jsonl(tmp_path, {"prompt": "x", "image": f"images/{name}"}), "train", "geneval_image"
    )
    with pytest.raises(DataError, match=f"train_metadata.jsonl:1: field 'image' .*{name}"):
        _ = item.image


@pytest.mark.parametrize(("suffix", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])
@pytest.mark.parametrize("struct", [True, False])
def test_arrow_editing(tmp_path, suffix, write, struct):
    images = [encoded(color) for color in COLORS]
    column = [{"bytes": data, "path": None} for data in images] if struct else images
    write(tmp_path / f"test.{suffix}", table(column, category=list("abcde"), note=[1, 2, 3, None, 5]))
    items = load_prompts(tmp_path, "test", "arrow_editing")
    assert [item.item_id for item in items] == list(range(5))
    assert [item.prompt for item in items] == [f"make it {color}" for color in COLORS]
    assert [item.metadata["category"] for item in items] == list("abcde")
    for item, data in zip(items, images, strict=True):
        assert np.array_equal(np.asarray(item.image), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize(("suffix", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])
def test_images_are_read_in_several_threads_at_once(tmp_path, suffix, write):
    """Each reward reads an item's image in a thread of its own."""
    write(tmp_path / f"test.{suffix}", table([encoded(color) for color in COLORS]))
    items = load_prompts(tmp_path, "test", "arrow_editing")
    expected = [item.image.getpixel((0, 0)) for item in items]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda item: item.image.getpixel((0, 0)), items * 100)) == expected * 100


@pytest.mark.slow  # importing datasets
def test_what_datasets_saves_is_read(tmp_path):
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    rows = {"prompt": ["a", "b"], "image": [{"bytes": encoded(c), "path": None} for c in ("red", "blue")]}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.to_parquet(str(tmp_path / "train.parquet"))
    saved.save_to_disk(str(tmp_path / "disk"))
    next((tmp_path / "disk").glob("*.arrow")).rename(tmp_path / "test.arrow")
    for split in ("train", "test"):
        items = load_prompts(tmp_path, split, "arrow_editing")
        assert [item.image.getpixel((0, 0)) for item in items] == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pa.table({"image": [b"x"]}), "column 'prompt' is missing; it has image"),
        (pa.table({"prompt": ["x"]}), "column 'image' is missing"),
        (pa.table({"prompt": [1], "image": [b"x"]}), "row 0: field 'prompt' must be a text, got 1"),
        (pa.table({"prompt": [["x"]], "image": [b"x"]}), "row 0: field 'prompt' must be a text, got None"),
        (pa.table({"prompt": ["x"], "image": ["path.png"]}), "row 0: field 'image' has no bytes"),
        (table([encoded("red"), b"x", encoded("red")]), "row 1: field 'image' is not an image"),
        (table([{"bytes": encoded("red")}, {"bytes": None}]), "row 1: field 'image' has no bytes"),
    ],
)
@pytest.mark.parametrize(("suffix", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])
def test_arrow_errors_name_file_row_and_field(tmp_path, suffix, write, data, named):
    write(tmp_path / f"train.{suffix}", data)
    with pytest.raises(DataError, match=rf"train.{suffix}: {named}"):
        _ = [item.images for item in load_prompts(tmp_path, "train", "arrow_editing")]


def test_missing_and_broken_tables(tmp_path):
    with pytest.raises(DataError, match="neither train.arrow nor train.parquet"):
        load_prompts(tmp_path, "train", "arrow_editing")
    (tmp_path / "train.arrow").write_bytes(b"no table")
    with pytest.raises(DataError, match="train.arrow cannot be read"):
        load_prompts(tmp_path, "train", "arrow_editing")


def test_turned_photographs_are_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    Image.new("RGB", (12, 8)).save(buffer, format="JPEG", exif=exif)
    write_parquet(tmp_path / "train.parquet", table([buffer.getvalue()]))
    assert load_prompts(tmp_path, "train", "arrow_editing")[0].image.size == (8, 12)


def test_several_images_keep_their_order(tmp_path):
    rows = {"prompt": "x", "images": ["images/b.png", "images/a.png"]}, {"prompt": "y", "images": ["images/a.png"]}
    folder = write_jsonl(tmp_path, *rows)
    (folder / "images" / "b.png").write_bytes(encoded("blue"))
    items = load_prompts(folder, "train", "geneval_image")
    cells = [[encoded("blue"), encoded("red")], [encoded("red")], [encoded("lime"), encoded("red"), encoded("blue")]]
    structs = [[{"bytes": data, "path": None} for data in cell] for cell in cells]
    for suffix, write, column in (("arrow", write_arrow, structs), ("parquet", write_parquet, cells)):
        write(tmp_path / f"test.{suffix}", pa.table({"prompt": ["x", "y", "z"], "images": column}))
        rows = load_prompts(tmp_path, "test", "arrow_editing")
        (tmp_path / f"test.{suffix}").unlink()
        assert [item.num_images for item in rows] == [2, 1, 3]
        assert [image.getpixel((0, 0)) for image in rows[2].images] == [(0, 255, 0), (255, 0, 0), (0, 0, 255)]
        items += rows[:2]
    for first, second in zip(items[::2], items[1::2], strict=True):
        assert [image.getpixel((0, 0)) for image in first.images] == [(0, 0, 255), (255, 0, 0)]
        assert (second.num_images, second.images[0].getpixel((0, 0)), second.more_images) == (1, (255, 0, 0), ())
        loaded = dataclasses.replace(first)
        assert loaded.images == loaded.images and loaded.images[1] is loaded.more_images[0]  # read once


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ([[encoded("red")], None], "row 1: field 'images' has no image"),
        ([[encoded("red")], [encoded("red"), None]], "row 1: field 'images' has no bytes"),
    ],
)
def test_wrong_columns_of_images_are_named(tmp_path, images, named):
    write_parquet(tmp_path / "train.parquet", pa.table({"prompt": ["x", "y"], "images": images}))
    with pytest.raises(DataError, match=rf"train.parquet: {named}"):
        _ = [item.images for item in load_prompts(tmp_path, "train", "arrow_editing")]
