"""Editing sets: instructions with reference images, from files next to a jsonl or from Arrow and Parquet tables."""

import io
import json
from concurrent.futures import ThreadPoolExecutor

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
    (folder / "images" / "b.png").write_bytes(encoded("blue"))
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
        ({"prompt": "x", "image": "images/c.png"}, "field 'image' .*'images/c.png'"),
        ({"prompt": "x", "image": "images/a.png", "height": 3}, "'height' and 'width'"),
        ({"prompt": "x", "image": "images/cut.jpg"}, "field 'image' .*cut.jpg"),  # when it is read
        ({"prompt": "x", "image": "images/a.eps"}, "field 'image' .*a.eps"),
    ],
)
def test_geneval_image_errors_name_file_line_and_field(tmp_path, row, named):
    good = {"prompt": "x", "image": "images/a.png"}
    with pytest.raises(DataError, match=rf"train_metadata.jsonl:2: .*{named}"):
        _ = [item.image for item in load_prompts(write_jsonl(tmp_path, good, row), "train", "geneval_image")]


BY_FORMAT = pytest.mark.parametrize(("suffix", "write"), [("arrow", write_arrow), ("parquet", write_parquet)])


@BY_FORMAT
@pytest.mark.parametrize("struct", [True, False])
def test_arrow_editing(tmp_path, suffix, write, struct):
    """Each reward reads an item's image in a thread of its own."""
    images = [encoded(color) for color in COLORS]
    column = [{"bytes": data, "path": None} for data in images] if struct else images
    write(tmp_path / f"test.{suffix}", table(column, category=list("abcde"), note=[1, 2, 3, None, 5]))
    items = load_prompts(tmp_path, "test", "arrow_editing")
    assert [item.item_id for item in items] == list(range(5))
    assert [item.prompt for item in items] == [f"make it {color}" for color in COLORS]
    assert [item.metadata["category"] for item in items] == list("abcde")
    expected = [Image.open(io.BytesIO(data)).tobytes() for data in images]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda item: item.image.tobytes(), items * 100)) == expected * 100


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


def test_turned_photographs_are_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    buffer = io.BytesIO()
    Image.new("RGB", (12, 8)).save(buffer, format="JPEG", exif=exif)
    write_parquet(tmp_path / "train.parquet", table([buffer.getvalue()]))
    assert load_prompts(tmp_path, "train", "arrow_editing")[0].image.size == (8, 12)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (pa.table({"image": [b"x"]}), "column 'prompt' is missing"),
        (pa.table({"prompt": ["x"]}), "column 'image' is missing"),
        (pa.table({"prompt": [1], "image": [b"x"]}), "row 0: field 'prompt'"),
        (table([encoded("red"), b"x", encoded("red")]), "row 1: field 'image'"),
        (table([{"bytes": encoded("red")}, {"bytes": None}]), "row 1: field 'image'"),
        (pa.table({"prompt": ["x", "y"], "images": [[encoded("red")], [encoded("red"), None]]}), "row 1: field 'images'"),
    ],
)
@BY_FORMAT
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


def test_several_images_keep_their_order(tmp_path):
    folder = write_jsonl(tmp_path, {"prompt": "x", "images": ["images/b.png", "images/a.png"]}, {"prompt": "y", "images": ["images/a.png"]})
    cells = [[encoded("blue"), encoded("red")], [encoded("red")]]
    write_arrow(tmp_path / "test.arrow", pa.table({"prompt": ["x", "y"], "images": cells}))
    for split, kind in (("train", "geneval_image"), ("test", "arrow_editing")):
        first, second = load_prompts(folder, split, kind)
        assert [image.getpixel((0, 0)) for image in first.images] == [(0, 0, 255), (255, 0, 0)]
        assert (second.num_images, second.images[0].getpixel((0, 0)), second.more_images) == (1, (255, 0, 0), ())
