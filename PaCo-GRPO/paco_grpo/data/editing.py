"""Editing sets: an instruction and a reference image, or several in order (docs/method.md §2, ``geneval_image`` and ``arrow_editing``).

Images are opened each time an item's ``image`` is read, not before; a damaged one is named then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image
from pyarrow import compute, types

from paco_grpo.data.files import DataError, common_fields, json_lines
from paco_grpo.types import Item
from paco_judge.images import UnreadableImage, read_image


def load_geneval_image(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}_metadata.jsonl``: ``prompt``, ``image`` (path from the dataset's folder) or ``images`` (a list of
    paths), optional sizes.

    Raises:
        DataError: A field is missing or wrong, or an image does not exist.
    """
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        prompt, height, width = common_fields(row, where)
        field = "images" if "images" in row else "image"
        names = row.get("images", [row.get("image")])
        if not isinstance(names, list) or not names or {"image", "images"} <= row.keys():
            raise DataError(f"{where}: field 'images' must be a list of paths from {folder}, in place of 'image'")
        own = []
        for name in names:
            if not isinstance(name, str) or not os.path.isfile(folder / name):  # names may be too long for a file
                raise DataError(f"{where}: field {field!r} must name a file in {folder}, got {name!r}")
            own.append(partial(_open_image, folder / name, f"{where}: field {field!r} ({name!r})"))
        items.append(Item(len(items), prompt, height, width, dict(row), own[0], tuple(own[1:])))
    return items


def load_arrow_editing(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}.arrow`` (as ``datasets`` saves it) or ``{split}.parquet``.

    Columns: ``prompt`` (text) and ``image`` (encoded bytes, or a struct with ``bytes``) or ``images`` (a list of them).
    Other columns that are texts or numbers go into an item's metadata. The file is read in pieces: its images are never all
    in memory.

    Raises:
        DataError: No such file, a column is missing, or a row's prompt cannot be used.
    """
    path = next((p for p in (folder / f"{split}.arrow", folder / f"{split}.parquet") if p.is_file()), None)
    if path is None:
        raise DataError(f"neither {split}.arrow nor {split}.parquet is in {folder} (config.dataset, config.prompt_fn)")
    items = []
    try:
        schema, pieces = _open_table(path)
        column = "images" if "images" in schema.names and "image" not in schema.names else "image"
        for needed in ("prompt", column):
            if needed not in schema.names:
                raise DataError(f"{path}: column {needed!r} is missing; it has {', '.join(schema.names)}")
        plain = [f.name for f in schema if not (types.is_nested(f.type) or types.is_binary(f.type))]
        for read in pieces:
            rows = read(plain).to_pylist()
            counts = [1] * len(rows)
            if column == "images":
                counts = compute.list_value_length(read([column]).column(0)).to_pylist()
            for row, (metadata, count) in enumerate(zip(rows, counts, strict=True)):
                where = f"{path}: row {len(items)}"
                prompt, height, width = common_fields(metadata, where)
                if not count:
                    raise DataError(f"{where}: field {column!r} has no image")
                what = f"{where}: field {column!r}"
                own = [partial(_image_of_row, read, column, row, number, what) for number in range(count)]
                items.append(Item(len(items), prompt, height, width, metadata, own[0], tuple(own[1:])))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}; copy or download it again") from error
    return items


def _open_table(path: Path) -> tuple[Any, list[Callable[[list[str]], Any]]]:
    """The schema of an Arrow or Parquet file, and for each of its pieces a function that reads columns of it."""
    source = pyarrow.memory_map(str(path))
    if path.suffix == ".parquet":
        mapped = source.read_buffer()
        file = pyarrow.parquet.ParquetFile(mapped)
        pieces = [partial(_read_row_group, mapped, file.metadata, number) for number in range(file.num_row_groups)]
        return file.schema_arrow, pieces
    try:  # ``datasets`` writes the stream format
        table = pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        table = pyarrow.ipc.open_file(source).read_all()
    return table.schema, [batch.select for batch in table.to_batches()]


def _read_row_group(mapped: pyarrow.Buffer, metadata: Any, number: int, columns: list[str]) -> Any:
    # Its own reader each time: rewards read images in several threads, and a ParquetFile is not safe for that.
    return pyarrow.parquet.ParquetFile(mapped, metadata=metadata).read_row_group(number, columns)


def _image_of_row(read: Callable[[list[str]], Any], column: str, row: int, number: int, what: str) -> Image.Image:
    value = read([column]).column(0)[row].as_py()
    encoded = (value if isinstance(value, list) else [value])[number]
    if isinstance(encoded, dict):
        encoded = encoded.get("bytes")
    if not isinstance(encoded, bytes):
        raise DataError(f"{what} has no bytes; save the set with its images embedded")
    return _open_image(encoded, what)


def _open_image(source: Path | bytes, what: str) -> Image.Image:
    """RGB, upright according to its EXIF data. Raises DataError."""
    try:
        return read_image(source, upright=True)
    except UnreadableImage as error:
        raise DataError(f"{what} {error}") from error
