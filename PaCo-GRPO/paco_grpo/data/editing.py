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

Read = Callable[[list[str]], Any]  # names of columns → a table of them


def load_geneval_image(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}_metadata.jsonl``: ``prompt``, ``image`` (path from the dataset's folder) or ``images`` (a list of
    paths), optional sizes.

    Raises:
        DataError: A field is missing or wrong, or an image does not exist.
    """
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        prompt, height, width = common_fields(row, where)
        if "images" in row and ("image" in row or not isinstance(row["images"], list) or not row["images"]):
            raise DataError(f"{where}: field 'images' must be a list of paths from {folder}, in place of 'image'")
        field = "images" if "images" in row else "image"
        own = [_file(folder, name, f"{where}: field {field!r}") for name in row.get("images", [row.get("image")])]
        first, *more = (partial(_open_image, *source) for source in own)
        given = {"metadata": dict(row), "image": first, "more_images": tuple(more)}
        items.append(Item(len(items), prompt, height, width, **given))
    return items


def _file(folder: Path, name: Any, what: str) -> tuple[Path, str]:
    """The path of an image, and its place in words."""
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{what} must be a path from {folder}, got {name!r}")
    path = folder / name
    if not os.path.isfile(path):  # unlike Path.is_file also of names that are too long for a file
        raise DataError(f"{what} names {name!r}, but {path} does not exist")
    return path, f"{what} ({name!r})"


def load_arrow_editing(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}.arrow`` (as ``datasets`` saves it) or ``{split}.parquet``.

    Columns: ``prompt`` (text) and ``image`` (encoded bytes, or a struct with ``bytes``) or ``images`` (a list of them). Other columns that are texts or
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
    texts, column = _columns(schema, path)
    items = []
    for read in pieces:
        counts = _counts(read, column, path)
        for row, metadata in enumerate(_rows(read, texts, path).to_pylist()):
            where = f"{path}: row {len(items)}"
            prompt, height, width = common_fields(metadata, where)
            what = f"{where}: field {column!r}"
            if not (count := 1 if counts is None else counts[row]):
                raise DataError(f"{what} has no image")
            first, *more = (partial(_image_of_row, read, column, row, number, what) for number in range(count))
            given = {"metadata": metadata, "image": first, "more_images": tuple(more)}
            items.append(Item(len(items), prompt, height, width, **given))
    return items


def _counts(read: Read, column: str, path: Path) -> list[int | None] | None:
    """The number of images of each row; None: one each."""
    if column == "image":
        return None
    return compute.list_value_length(_rows(read, [column], path).column(0)).to_pylist()


def _rows(read: Read, columns: list[str], path: Path) -> Any:
    try:
        return read(columns)
    except (pyarrow.ArrowException, OSError) as error:  # a damaged page
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}; copy or download it again") from error


def _open_table(path: Path) -> tuple[Any, list[Read]]:
    """The schema of an Arrow or Parquet file, and for each of its pieces a function that reads columns of it."""
    try:
        source = pyarrow.memory_map(str(path))
        if path.suffix == ".parquet":
            mapped = source.read_buffer()
            file = pyarrow.parquet.ParquetFile(mapped)
            pieces = [partial(_read_row_group, mapped, file.metadata, number) for number in range(file.num_row_groups)]
            return file.schema_arrow, pieces
        try:  # ``datasets`` writes the stream format
            batches = list(pyarrow.ipc.open_stream(source))
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        return batches[0].schema, [batch.select for batch in batches]
    except (pyarrow.ArrowInvalid, OSError, IndexError) as error:
        raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from error


def _read_row_group(mapped: pyarrow.Buffer, metadata: Any, number: int, columns: list[str]) -> Any:
    # Its own reader each time: rewards read images in several threads, and a ParquetFile is not safe for that.
    return pyarrow.parquet.ParquetFile(mapped, metadata=metadata).read_row_group(number, columns)


def _columns(schema: Any, path: Path) -> tuple[list[str], str]:
    """The columns of texts and numbers, and that of the images, after a check of it and of ``prompt``."""
    column = "images" if "images" in schema.names and "image" not in schema.names else "image"
    for needed in ("prompt", column):
        if needed not in schema.names:
            raise DataError(f"{path}: column {needed!r} is missing; it has {', '.join(schema.names)}")
    kind = encoded = schema.field(column).type
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if is_list:
        encoded = kind.value_type
    if types.is_struct(encoded) and encoded.get_field_index("bytes") >= 0:
        encoded = encoded.field("bytes").type
    if is_list != (column == "images") or not (types.is_binary(encoded) or types.is_large_binary(encoded)):
        lists = "lists of " if column == "images" else ""
        raise DataError(f"{path}: column {column!r} must hold {lists}bytes or a struct with 'bytes', it is {kind}")
    plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
    texts = [field.name for field in schema if any(test(field.type) for test in plain)]
    if "prompt" not in texts:
        raise DataError(f"{path}: column 'prompt' must hold text, it is {schema.field('prompt').type}")
    return texts, column


def _image_of_row(read: Read, column: str, row: int, number: int, what: str) -> Image.Image:
    value = read([column]).column(0)[row].as_py()
    encoded = (value if isinstance(value, list) else [value])[number]
    if isinstance(encoded, dict):
        encoded = encoded["bytes"]
    if encoded is None:
        raise DataError(f"{what} has no bytes; save the set with its images embedded")
    return _open_image(encoded, what)


def _open_image(source: Path | bytes, what: str) -> Image.Image:
    """RGB, upright according to its EXIF data. Raises DataError."""
    try:
        return read_image(source, upright=True)
    except UnreadableImage as error:
        raise DataError(f"{what} {error}") from error
