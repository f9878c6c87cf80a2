"""Prompt sets: files become items (docs/method.md §2). Errors name file, row and field."""

import codecs
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import pyarrow as pa
from PIL import Image
from pyarrow import compute
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paco_grpo.names import find_function
from paco_grpo.types import Item
from paco_judge.errors import UserError, first_problem
from paco_judge.files import read_json, read_json_lines, read_text
from paco_judge.grid import PromptLayoutError, split_prompt
from paco_judge.images import UnreadableImage, check_header, read_image

_LARGEST_SIDE = 1 << 16  # pixels
_FILE_FORMAT = b"ARROW1"  # the first bytes of Arrow's file format
# Columns of a table that an item's metadata have: texts and numbers. Polars writes large ones.
_PLAIN = ("string", "large_string", "bool", "int", "uint", "float")


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file: row 1``, JSON object) of every line that is not blank. Raises UserError."""
    for number, row in enumerate(read_json_lines(path), start=1):
        yield f"{path}: row {number}", row


_Box = Annotated[list[float], Field(min_length=4, max_length=4)]


class _Row(BaseModel):
    """What a row states; its other fields are for rewards."""

    model_config = ConfigDict(strict=True)

    prompt: str = Field(pattern=r"\S")
    height: int | None = Field(None, ge=1, le=_LARGEST_SIDE)  # pixels
    width: int | None = Field(None, ge=1, le=_LARGEST_SIDE)
    open: bool | None = None
    category: str | None = None  # by which an evaluation groups its scores
    criteria: dict[str, dict[str, str | None] | None] | None = None  # {dimension: {name: text}}
    # Of each reference image, where what must be kept is: left, top, right and bottom in shares of
    # width and height. None: everywhere.
    reference_boxes: list[_Box | None] | None = None


def make_item(
    number: int,
    row: Mapping[str, Any],
    where: str,
    references: Sequence[Callable[[], Image.Image]] = (),
) -> Item:
    """The item of a row (``_Row``). Raises UserError, naming ``where``."""
    try:
        fields = _Row.model_validate(row)
    except ValidationError as error:
        raise UserError(f"{where}: field {first_problem(error)}") from error
    if (fields.height is None) != (fields.width is None):
        raise UserError(f"{where}: fields 'height' and 'width' must be given together")
    if fields.reference_boxes and references:
        _check_boxes(fields.reference_boxes, len(references), where)
    return Item(
        item_id=number,
        prompt=fields.prompt,
        height=fields.height,
        width=fields.width,
        metadata=dict(row),
        references=tuple(references),
        place=where,
    )


def _check_boxes(boxes: Sequence[Sequence[float] | None], count: int, where: str) -> None:
    """Raises UserError: They are not one for each of ``count`` images, or one is not inside."""
    what = f"{where}: field 'reference_boxes'"
    if len(boxes) != count:
        raise UserError(f"{what} has {len(boxes)} boxes for {count} reference images")
    for box in boxes:
        if box is None:
            continue
        left, top, right, bottom = box
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise UserError(
                f"{what} has {box}, which is not inside the image: a box is [left, top, right, "
                "bottom] in shares of width and height"
            )


def load_prompts(
    dataset: str | Path, split: str, kind: str = "geneval", option: str = "dataset"
) -> list[Item]:
    """The items of one split, ``train`` or ``test``, of a folder.

    ``kind`` is as in ``find_kind``. Raises UserError, which names ``config.<option>``.
    """
    folder = Path(dataset)
    if not folder.is_dir():
        hint = ""
        if folder.name.startswith("public-"):
            public_name = folder.name.removeprefix("public-")
            hint = f"; fetch it with `python dataset/fetch.py {public_name}`"
        elif folder.name == "T2IS-twins":
            arguments = "t2is --source dataset/T2IS --open_twins --output dataset/T2IS-twins"
            hint = f"; make it with `python dataset/fetch.py {arguments}`"
        raise UserError(
            f"prompt set {str(folder.absolute())!r} (config.{option}) is not a folder{hint}"
        )
    try:
        items = list(find_kind(kind)(folder, split))
    except FileNotFoundError as error:
        raise UserError(f"{error}; config.prompt_fn={kind!r} names the kind of files") from error
    if not items:
        raise UserError(f"prompt set {folder} has no item in its {split} split")
    return items


def find_kind(name: str) -> "PromptFn":
    """A function of ``KINDS`` or, of ``package.module:function``, of your own. Raises UserError."""
    try:
        return KINDS.get(name) or find_function(name, list(KINDS))
    except ValueError as error:
        raise UserError(f"config.prompt_fn={error}") from error


def _geneval(folder: Path, split: str) -> list[Item]:
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        name = f"{where} (item {row['idx']!r})" if "idx" in row else where
        item = make_item(len(items), row, name)
        try:
            split_prompt(item.prompt)
        except PromptLayoutError as error:
            raise UserError(f"{name}: field 'prompt': {error}") from error
        items.append(item)
    return items


def read_items(file: Path, with_images: bool) -> list[Item]:
    """The items of a file: rows in JSON, a table (``read_table``), or a prompt a line.

    ``with_images``: the rows name reference images. Raises UserError.
    """
    suffix = file.suffix.lower()
    if suffix in (".arrow", ".parquet"):
        return read_table(file, with_images)
    if suffix not in (".json", ".jsonl", ".txt", ""):
        raise UserError(
            f"{file}: prompts are read from .txt (one a line), .json, .jsonl, .arrow and .parquet"
        )
    items: list[Item] = []
    text = "" if suffix.startswith(".json") else read_text(file)
    if suffix.startswith(".json") or text.lstrip().startswith(("{", "[")):
        for where, row in _json_rows(file):
            references = _references(file.parent, row, where) if with_images else ()
            items.append(make_item(len(items), row, where, references))
        return items
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            items.append(make_item(len(items), {"prompt": line.strip()}, f"{file}:{number}"))
    return items


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file: row 1``, object) of each line of JSON, or of each element of one JSON list.

    A prompt alone becomes an object. A .txt file may contain JSON, too. Raises UserError.
    """
    try:
        is_list = file.read_bytes().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        rows = read_json(file) if is_list else read_json_lines(file)
    except UserError as error:
        if file.suffix.lower().startswith(".json"):
            raise
        hint = "in a text, the first prompt may not begin with { or ["
        raise UserError(f"{error}; {hint}") from error
    for number, row in enumerate(rows, start=1):
        where = f"{file}: row {number}"
        if not isinstance(row, dict | str):
            raise UserError(f"{where} is neither an object nor a text, but {row!r}")
        yield where, {"prompt": row} if isinstance(row, str) else row


def _references(folder: Path, row: Mapping[str, Any], where: str) -> list["StoredImage"]:
    """The images that a row names, by paths from ``folder``."""
    field = "images" if "images" in row else "image"
    names = row.get("images", [row.get("image")])
    references = []
    for name in names:
        # os.path, because a text that is too long for a name is no error there.
        if not isinstance(name, str) or not os.path.isfile(folder / name):
            raise UserError(f"{where}: field {field!r} must name a file in {folder}, got {name!r}")
        file = folder / name
        what = f"{where}: field {field!r} ({name!r})"
        references.append(StoredImage(str(file), file, what, partial(Path, file)))
    return references


def _text(folder: Path, split: str) -> list[Item]:
    return read_items(folder / f"{split}.txt", with_images=False)


def _geneval_image(folder: Path, split: str) -> list[Item]:
    return read_items(folder / f"{split}_metadata.jsonl", with_images=True)


def _arrow_editing(folder: Path, split: str) -> list[Item]:
    path = folder / f"{split}.arrow"
    if not path.is_file():
        path = folder / f"{split}.parquet"
    if not path.is_file():
        raise FileNotFoundError(f"neither {split}.arrow nor {split}.parquet is in {folder}")
    return read_table(path, with_images=True)


def read_table(path: Path, with_images: bool) -> list[Item]:
    """The items of an Arrow or Parquet table.

    Columns of texts and numbers, also nested ones, go into an item's metadata. The images are never
    all in memory.

    Args:
        path: The table.
        with_images: Its images, which it must have, are the items' references.

    Raises:
        UserError: It is damaged, or lacks a column.
    """
    from datasets import Dataset  # seconds; only these sets need it
    from datasets.exceptions import DatasetGenerationError

    try:
        if path.suffix.lower() == ".parquet":
            table = Dataset.from_parquet(str(path))  # keeps a copy in the cache of ``datasets``
        else:
            table = Dataset(_read_arrow(path))
    except (DatasetGenerationError, pa.ArrowException, ValueError, OSError) as error:
        raise UserError(f"{path} is empty or damaged: {error.__cause__ or error}") from error
    names = table.column_names
    column = "images" if "images" in names and "image" not in names else "image"
    missing = {"prompt", column if with_images else "prompt"} - set(names)
    if missing:
        raise UserError(f"{path}: column {max(missing)!r} is missing; it has {', '.join(names)}")
    plain = [name for name, kind in table.features.items() if _is_plain(kind)]
    rows = table.select_columns(plain).to_list()
    items = []
    if not with_images:
        for number, row in enumerate(rows):
            items.append(make_item(number, row, f"{path}: row {number + 1}"))
        return items
    images = table.data.column(column)
    counts = [1] * len(rows)
    if column == "images":
        counts = compute.list_value_length(images).to_pylist()
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        where = f"{path}: row {number + 1}"
        what = f"{where}: field {column!r}"
        if not count:
            raise UserError(f"{what} has no image")
        references = []
        for place in range(count):
            content = partial(_content_of_row, images, number, place)
            references.append(StoredImage(f"{path}:{number}:{place}", path, what, content))
        items.append(make_item(number, row, where, references))
    return items


def _read_arrow(path: Path) -> pa.Table:
    """A table in Arrow's stream format, as ``datasets`` saves it, or in its file format.

    Unless it is compressed, its images stay on the disk. Raises ArrowException, ValueError, OSError.
    """
    with path.open("rb") as file:
        is_file_format = file.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    read = pa.ipc.open_file if is_file_format else pa.ipc.open_stream
    table = read(pa.memory_map(str(path))).read_all()
    table.validate(full=True)  # a wrong offset could end the process
    return table


def _is_plain(kind: object) -> bool:
    """Whether a column of this kind holds texts and numbers, or lists and tables of them."""
    from datasets import Value

    if isinstance(kind, dict):
        return all(map(_is_plain, kind.values()))
    if isinstance(kind, list):  # of datasets 3
        return _is_plain(kind[0])
    if hasattr(kind, "feature"):
        return _is_plain(kind.feature)
    return isinstance(kind, Value) and kind.dtype.startswith(_PLAIN)


def _content_of_row(images: pa.ChunkedArray, row: int, place: int) -> BinaryIO:
    """The bytes of an image; only those that are read are copied. Raises UnreadableImage."""
    value = images[row]
    if pa.types.is_list(value.type) or pa.types.is_large_list(value.type):
        value = value[place]
    if pa.types.is_struct(value.type) and value.is_valid:
        value = value.get("bytes")
    if not isinstance(value, pa.BinaryScalar) or not value.is_valid:
        raise UnreadableImage("has no bytes; save the set with its images embedded")
    return pa.BufferReader(value.as_buffer())


@dataclass(frozen=True)
class StoredImage:
    """An image of a prompt set; calling it reads it."""

    name: str  # its file, and its place in a table
    file: Path  # it alone, or the table
    what: str  # where the prompt set names it
    content: Callable[[], Path | BinaryIO]

    def __call__(self) -> Image.Image:
        """RGB, upright according to its EXIF data. Raises UserError."""
        try:
            return read_image(self.content())
        except UnreadableImage as error:
            raise UserError(f"{self.what} {error}") from error

    def check_header(self) -> None:
        """Raise a UserError if the file does not begin as an image does."""
        try:
            check_header(self.content())
        except UnreadableImage as error:
            raise UserError(f"{self.what} {error}") from error


def read_reference(source: Path | bytes, what: str) -> Image.Image:
    """RGB, upright according to its EXIF data. Raises UserError."""
    try:
        return read_image(source)
    except UnreadableImage as error:
        raise UserError(f"{what} {error}") from error


# Folder, split → the items in order.
PromptFn = Callable[[Path, str], Iterable[Item]]
KINDS: dict[str, PromptFn] = {
    "geneval": _geneval,
    "general_ocr": _text,
    "text": _text,
    "geneval_image": _geneval_image,
    "arrow_editing": _arrow_editing,
}
