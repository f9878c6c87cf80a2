"""Editing sets: an instruction and a reference image (docs/method.md §2, ``geneval_image`` and ``arrow_editing``).

Images are checked when the set is read, and opened again each time an item's ``image`` is read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image, ImageOps, UnidentifiedImageError
from pyarrow import types

from paco_grpo.data.files import DataError, given_size, json_lines, prompt_of
from paco_grpo.types import Item

Read = Callable[[list[str]], Any]  # names of columns → a table of them


def load_geneval_image(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}_metadata.jsonl``: ``prompt``, ``image`` (path from the dataset's folder), optional sizes.

    Raises:
        DataError: A field is missing or wrong, or an image does not exist or cannot be read.
    """
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        prompt = prompt_of(row, where)
        height, width = given_size(row, where)
        name = row.get("image")
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{where}: field 'image' must be a path from {folder}, got {name!r}")
        path = folder / name
        if not path.is_file():
            raise DataError(f"{where}: field 'image' names {name!r}, but {path} does not exist")
        _check_image(path, f"{where}: field 'image' ({name!r})")
        items.append(Item(len(items), prompt, height, width, metadata=dict(row), image=partial(_open_image, path)))
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
        images = read(["image"]).column(0)
        for row, metadata in enumerate(read(texts).to_pylist()):
            where = f"{path}: row {len(items)}"
            prompt = prompt_of(metadata, where)
            height, width = given_size(metadata, where)
            data = _bytes(images[row])
            if data is None:
                raise DataError(f"{where}: field 'image' has no bytes; save the set with its images embedded")
            _check_image(io.BytesIO(data), f"{where}: field 'image'")
            image = partial(_image_of_row, read, row)
            items.append(Item(len(items), prompt, height, width, metadata=metadata, image=image))
    return items


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


def _image_of_row(read: Read, row: int) -> Image.Image:
    return _open_image(io.BytesIO(_bytes(read(["image"]).column(0)[row])))


def _check_image(source: Path | io.BytesIO, what: str) -> None:
    try:
        with Image.open(source):  # reads only the header
            pass
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{what} is not an image that can be read: {str(error).splitlines()[0]}") from error


def _open_image(source: Path | io.BytesIO) -> Image.Image:
    """RGB, upright according to its EXIF data."""
    with Image.open(source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
