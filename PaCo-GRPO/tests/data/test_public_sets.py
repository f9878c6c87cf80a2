"""Converters on small files with the public sets' columns; without a hub the error says what to
do.
"""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from paco_grpo.data.prompts import load_prompts
from paco_judge.grid import split_prompt

FOLDER = Path(__file__).resolve().parents[2] / "dataset"


def encoded(color, kind="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(buffer, format=kind)
    return buffer.getvalue()


def grid_row(number, **more):
    prompt = f"A 1x2 grid layout of cat {number}. [LEFT]:asleep. [RIGHT]:awake."
    return {
        "prompt": prompt,
        "idx": f"{number:04d}",
        "theme": f"Draw cat {number}.",
        "layout": "1x2",
    } | more


def write(file, content):
    """Bytes, a text, or rows as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_t2is_in_one_file_is_divided_by_theme(fetch, source, tmp_path):
    """Prompts of one theme differ, and some have none: then the prompt counts."""
    rows = []
    for number in range(60):
        row = grid_row(number, theme=f"Draw cat {number // 2}.")
        rows.append(row if number < 40 else {"prompt": row["prompt"], "idx": row["idx"]})
    write(source / "T2IS-Bench.jsonl", rows)
    assert fetch.run("t2is") == 0
    train = load_prompts(tmp_path / "out", "train")
    test = load_prompts(tmp_path / "out", "test")
    assert len({item.prompt for item in (*train, *test)}) == 60 and 0 < len(test) < 16
    train_themes = {item.metadata.get("theme", item.prompt) for item in train}
    assert train_themes.isdisjoint(item.metadata.get("theme", item.prompt) for item in test)


def test_a_published_prompt_folder_stays_as_it_is(fetch, source, tmp_path):
    rows = [grid_row(2), grid_row(1)]
    for split in ("train", "test"):  # of the same items
        write(source / "half_leq_4" / f"{split}_metadata.jsonl", rows)
    assert fetch.run("t2is", "--source", str(source / "half_leq_4")) == 0
    for split in ("train", "test"):
        assert [item.metadata for item in load_prompts(tmp_path / "out", split)] == rows


def test_gedit_is_a_test_split_of_one_language(fetch, source, tmp_path):
    rows = []
    for i, (kind, language) in enumerate([("color", "en"), ("color", "cn"), ("human", "en")]):
        row = {"task_type": kind, "key": f"k/{i}", "instruction": f"do {i}"}
        row |= {"instruction_language": language, "input_image": {"bytes": encoded("red")}}
        rows.append(row | {"input_image_raw": {"bytes": encoded("blue", "JPEG")}})
    pq.write_table(pa.Table.from_pylist(rows), source / "train-00000-of-00001.parquet")
    assert fetch.run("gedit") == 0
    items = load_prompts(tmp_path / "out", "test", "geneval_image")
    found = [(item.prompt, item.metadata["category"], item.metadata["idx"]) for item in items]
    assert found == [("do 0", "color", "k/0"), ("do 2", "human", "k/2")]
    red, _, blue = items[0].image.getpixel((0, 0))
    assert red < 10 and blue > 245  # the raw image, not the resized one


def test_sharegpt_4o_image_reads_files_and_archives(fetch, source, tmp_path):
    """Two instructions edit each picture, which is in one split."""
    rows = [{"input_prompt": "two", "input_image": ["a.png", "b.png"]}]  # left out
    names = [f"text_and_image_to_image/input_{i}.png" for i in range(40)]
    for verb in ("edit", "turn"):
        rows += [{"input_prompt": f"{verb} {i}", "input_image": [names[i]]} for i in range(40)]
    rows[-1]["input_image"] = names[-1]
    write(source / "text_and_image_to_image.json", json.dumps(rows))
    for i, name in enumerate(names):
        write(source / name, encoded((i, 0, 0)))
    with tarfile.open(source / "text_and_image_to_image_part_0.tar", "w") as archive:
        for name in names[::2]:
            archive.add(source / name, name)
            (source / name).unlink()
    assert fetch.run("sharegpt-4o-image") == 0
    edits = set()
    pictures = {}
    for split in ("train", "test"):
        items = load_prompts(tmp_path / "out", split, "arrow_editing")
        reds = [item.image.getpixel((0, 0))[0] for item in items]
        pictures[split] = set(reds)
        edits.update(zip([item.prompt for item in items], reds, strict=True))
    assert edits == {(f"{verb} {i}", i) for verb in ("edit", "turn") for i in range(40)}
    assert pictures["test"] and pictures["test"].isdisjoint(pictures["train"])


def test_lists_of_prompts(fetch, source, tmp_path):
    """Pick-a-Pic's captions are unique and in one split; OCR prompts have a quoted text."""
    for name, captions in (
        ("train-0", ["a cat", "a  dog\n", "both"]),
        ("test_unique-0", ["both", "bird", "bird"]),
    ):
        pq.write_table(
            pa.table({"caption": captions, "label_0": [0.5] * 3}), source / f"{name}.parquet"
        )
    write(source / "train.txt", 'A sign "Open"\nno text\nA sign "Open"\n')
    write(source / "test.txt", "A mug “Tea”\n")
    for name, expected in (
        ("pickscore", {"train": "a cat\na dog\n", "test": "both\nbird\n"}),
        ("ocr", {"train": 'A sign "Open"\n', "test": "A mug “Tea”\n"}),
    ):
        assert fetch.run(name, "--output", str(tmp_path / name)) == 0
        assert {
            split: (tmp_path / name / f"{split}.txt").read_text() for split in expected
        } == expected


def test_open_twins_of_our_own_set(fetch, tmp_path):
    assert fetch.run("t2is", "--source", str(FOLDER / "T2IS"), "--open_twins") == 0
    items = load_prompts(tmp_path / "out", "test")
    assert len(items) == 2 * len(load_prompts(FOLDER / "T2IS", "test"))
    for one, twin in zip(items[::2], items[1::2], strict=True):
        assert (one.metadata["open"], twin.metadata["open"]) == (False, True)
        grids = split_prompt(one.prompt), split_prompt(twin.prompt)
        assert grids[0].panels == grids[1].panels and grids[0].theme.startswith(grids[1].theme)
        assert (
            len(grids[1].theme) < len(grids[0].theme)
            and "Identity" not in twin.metadata["criteria"]
        )


def test_without_a_network_the_error_names_the_remedy(fetch, tmp_path, capsys):
    assert fetch.main(["t2is", "--output", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert "hf download" in message and "dataset/fetch.py t2is --source FOLDER" in message
    assert not (tmp_path / "out").exists()
