"""Editing sets: an instruction and a reference image (method §2, ``geneval_image`` and ``arrow_editing``).

Images are checked when the set is read and opened again each time an item's ``image`` is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from paco_grpo.data.files import DataError, given_size, json_lines, prompt_of
from paco_grpo.types import Item


def load_geneval_image(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}_metadata.jsonl``: ``prompt``, ``image`` (path from the dataset's folder), optional sizes.

    Raises:
        DataError: A field is missing or wrong, or an image is not there or cannot be read.
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
        _check_image(path, f"{where}: field 'image' names {name!r}, which")
        items.append(Item(len(items), prompt, height, width, metadata=dict(row), image=partial(_open_image, path)))
    return items


def load_arrow_editing(folder: Path, split: str) -> list[Item]:
    """Items of ``{split}.arrow`` (as ``datasets`` saves it) or ``{split}.parquet``.

    Columns: ``prompt`` (text) and ``image`` (encoded bytes, or a struct with ``bytes``). Other columns that are texts or
    numbers go into an item's metadata.

    Raises:
        DataError: No such file, a column is missing or of another type, or a row's prompt or image cannot be used.
    """
    path = next((p for p in (folder / f"{split}.arrow", folder / f"{split}.parquet") if p.is_file()), None)
    if path is None:
        raise DataError(
            f"neither {split}.arrow nor {split}.parquet is in {folder}; config.dataset names the folder, "
            "config.prompt_fn the kind"
        )
    table = _Table(path)
    items = []
    for number, row in enumerate(table.texts()):
        where = f"{path}: row {number}"
        prompt = prompt_of(row, where)
        height, width = given_size(row, where)
        items.append(Item(number, prompt, height, width, metadata=row, image=partial(table.image, number)))
    for number, data in enumerate(table.all_images()):
        if data is None:
            raise DataError(f"{path}: row {number}: field 'image' has no bytes; save the set with its images embedded")
        _check_image(io.BytesIO(data), f"{path}: row {number}: field 'image'")
    return items


class _Table:
    """An Arrow or Parquet file, read in pieces; images never all at once."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(f"{path}: reading it needs pyarrow: pip install 'paco-grpo[data]'") from error
        self.path = path
        try:
            if path.suffix == ".parquet":
                self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
                self.schema = self._file.schema_arrow
                self._read: Callable[[int, list[str]], Any] = lambda part, columns: self._file.read_row_group(
                    part, columns=columns
                )
                self._sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
            else:
                batches = _record_batches(pyarrow, path)
                self.schema = batches[0].schema
                self._read = lambda part, columns: batches[part].select(columns)
                self._sizes = [batch.num_rows for batch in batches]
        except (pyarrow.ArrowInvalid, OSError, IndexError) as error:
            raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from error
        self._check_schema(pyarrow.types)

    def _check_schema(self, types: Any) -> None:
        names = self.schema.names
        for column in ("prompt", "image"):
            if column not in names:
                raise DataError(f"{self.path}: column {column!r} is missing; it has {', '.join(names)}")
        kind = self.schema.field("image").type
        self._in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        is_bytes = types.is_binary(kind) or types.is_large_binary(kind)
        if not (self._in_struct or is_bytes):
            raise DataError(f"{self.path}: column 'image' must hold bytes or a struct with 'bytes', it is {kind}")
        plain = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean)
        self._texts = [field.name for field in self.schema if any(test(field.type) for test in plain)]
        if "prompt" not in self._texts:
            raise DataError(f"{self.path}: column 'prompt' must hold text, it is {self.schema.field('prompt').type}")

    def texts(self) -> list[dict[str, Any]]:
        """All columns but images, a dict for each row."""
        return [row for part in range(len(self._sizes)) for row in self._read(part, self._texts).to_pylist()]

    def all_images(self):
        """Encoded images of all rows in order, None where there is none."""
        for part, size in enumerate(self._sizes):
            column = self._read(part, ["image"]).column(0)
            for row in range(size):
                yield self._bytes(column[row].as_py())

    def image(self, number: int) -> Image.Image:
        """The image of row ``number``."""
        part = 0
        row = number
        while row >= self._sizes[part]:
            row -= self._sizes[part]
            part += 1
        data = self._bytes(self._read(part, ["image"]).column(0)[row].as_py())
        return _open_image(io.BytesIO(data))

    def _bytes(self, value: Any) -> bytes | None:
        return value["bytes"] if self._in_struct and value is not None else value


def _record_batches(pyarrow: Any, path: Path) -> list[Any]:
    # Memory-mapped, so that only what is read is in memory. ``datasets`` writes the stream format.
    source = pyarrow.memory_map(str(path))
    try:
        return list(pyarrow.ipc.open_stream(source))
    except pyarrow.ArrowInvalid:
        file = pyarrow.ipc.open_file(source)
        return [file.get_batch(i) for i in range(file.num_record_batches)]


def _check_image(source: Path | io.BytesIO, what: str) -> None:
    try:
        with Image.open(source):  # reads the header alone
            pass
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{what} is not an image that can be read: {str(error).splitlines()[0]}") from error


def _open_image(source: Path | io.BytesIO) -> Image.Image:
    """RGB, upright as its EXIF data say."""
    with Image.open(source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")
