"""Editing sets: an instruction and a reference image (docs/method.md §2, ``geneval_image`` and ``arrow_editing``).

All images are checked when the set is read, and opened again each time an item's ``image`` is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image
from pyarrow import types
from tqdm import tqdm

from paco_grpo.data.files import DataError, given_size, json_lines, prompt_of
from paco_grpo.types import Item
from paco_judge.images import UnreadableImage, check_image, read_image

Read = Callable[[list[str]], Any]  # names of columns → a table of them


def load_geneval_image(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}_metadata.jsonl``: ``prompt``, ``image`` (path from the dataset's folder), optional sizes.

    Raises:
        DataError: A field is missing or wrong, or an image does not exist or cannot be read to its end.
    """
    items, images = [], []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        prompt = prompt_of(row, where)
        height, width = given_size(row, where)
        name = row.get("image")
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{where}: field 'image' must be a path from {folder}, got {name!r}")
        path = folder / name
        if not os.path.isfile(path):  # unlike Path.is_file also of names that are too long for a file
            raise DataError(f"{where}: field 'image' names {name!r}, but {path} does not exist")
        images.append((path, f"{where}: field 'image' ({name!r})"))
        image = partial(_open_image, *images[-1])
        items.append(Item(len(items), prompt, height, width, metadata=dict(row), image=image))
    _check_images(iter(images), len(images))
    return items


def load_arrow_editing(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}.arrow`` (as ``datasets`` saves it) or ``{split}.parquet``.

    Columns: ``prompt`` (text) and ``image`` (encoded bytes, or a struct with ``bytes``). Other columns that are texts or
    numbers go into an item's metadata. The file is read in pieces: its images are never all in memory.

    Raises:
        DataError: No such file, a column is missing or of another type, or a row's prompt or image cannot be used.
    """
    path = next((p for p in (folder / f"{split}.arrow", folder / f"{split}.parquet") if p.is_file()), None)
    if path is None:
        raise DataError(
            f"neither {split}.arrow nor {split}.parquet is in {folder}; config.dataset names the folder, "
            "config.prompt_fn the kind"
        )
    schema, pieces = _open_table(path)
    texts = _text_columns(schema, path)
    items = []
    for read in pieces:
        for row, metadata in enumerate(_rows(read, texts, path).to_pylist()):
            where = f"{path}: row {len(items)}"
            prompt = prompt_of(metadata, where)
            height, width = given_size(metadata, where)
            image = partial(_image_of_row, read, row, f"{where}: field 'image'")
            items.append(Item(len(items), prompt, height, width, metadata=metadata, image=image))
    _check_images(_images_of(pieces, path), len(items))
    return items


def _images_of(pieces: list[Read], path: Path) -> Iterator[tuple[bytes, str]]:
    """(encoded image, its place) of every row."""
    number = 0
    for read in pieces:
        for value in _rows(read, ["image"], path).column(0):
            data, what = _bytes(value), f"{path}: row {number}: field 'image'"
            if data is None:
                raise DataError(f"{what} has no bytes; save the set with its images embedded")
            yield data, what
            number += 1


def _rows(read: Read, columns: list[str], path: Path) -> Any:
    try:
        return read(columns)
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}; copy or download it again") from error


def _open_table(path: Path) -> tuple[Any, list[Read]]:
    """The schema of an Arrow or Parquet file, and for each of its pieces a function that reads columns of it."""
    try:
        if path.suffix == ".parquet":
            file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            pieces = [partial(file.read_row_group, number) for number in range(file.num_row_groups)]
            return file.schema_arrow, pieces
        source = pyarrow.memory_map(str(path))
        try:  # ``datasets`` writes the stream format
            batches = list(pyarrow.ipc.open_stream(source))
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        return batches[0].schema, [batch.select for batch in batches]
    except (pyarrow.ArrowInvalid, OSError, IndexError) as error:
        raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from error


def _text_columns(schema: Any, path: Path) -> list[str]:
    """The columns of texts and numbers, after a check of ``prompt`` and ``image``."""
    for column in ("prompt", "image"):
        if column not in schema.names:
            raise DataError(f"{path}: column {column!r} is missing; it has {', '.join(schema.names)}")
    kind = schema.field("image").type
    encoded = kind.field("bytes").type if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not (types.is_binary(encoded) or types.is_large_binary(encoded)):
        raise DataError(f"{path}: column 'image' must hold bytes or a struct with 'bytes', it is {kind}")
    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    texts = [field.name for field in schema if any(test(field.type) for test in plain)]
    if "prompt" not in texts:
        raise DataError(f"{path}: column 'prompt' must hold text, it is {schema.field('prompt').type}")
    return texts


def _bytes(value: Any) -> bytes | None:
    value = value.as_py()
    return value["bytes"] if isinstance(value, dict) else value


def _image_of_row(read: Read, row: int, what: str) -> Image.Image:
    return _open_image(_bytes(read(["image"]).column(0)[row]), what)


def _check_images(images: Iterator[tuple[Path | bytes, str]], count: int) -> None:
    """Raises DataError for the first image that cannot be read to its end; a training run would meet it hours later."""
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool, tqdm(desc="images", total=count, disable=None, delay=2) as bar:
        while piece := list(islice(images, 16 * workers)):  # a large set is never in memory
            for _ in pool.map(_check_image, *zip(*piece, strict=True)):
                bar.update()


def _check_image(source: Path | bytes, what: str) -> None:
    try:
        check_image(source)
    except UnreadableImage as error:
        raise DataError(f"{what} {error}") from error


def _open_image(source: Path | bytes, what: str) -> Image.Image:
    """RGB, upright according to its EXIF data. Raises DataError: it has changed since it was checked."""
    try:
        return read_image(source, upright=True)
    except UnreadableImage as error:
        raise DataError(f"{what} {error}") from error
