"""Prompt sets: files become items (docs/method.md §2). Errors name file, line and field."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image
from pyarrow import compute, types

from paco_grpo.types import Item
from paco_judge.grid import PromptLayoutError, split_prompt
from paco_judge.images import UnreadableImage, read_image
from paco_judge.json_io import DamagedJson, lines, parse_object

_LARGEST_SIDE = 1 << 16  # pixels


class DataError(ValueError):
    """A prompt set that cannot be used; the message names file, line and field."""


def text_of(path: Path) -> str:
    """The text without a byte order mark. Raises DataError."""
    _require(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from error


def _require(path: Path) -> None:
    if not path.is_file():
        raise DataError(
            f"prompt file {path} does not exist; config.dataset names its folder, "
            "config.prompt_fn its kind"
        )


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file:line``, JSON object) of every non-empty line. Raises DataError."""
    _require(path)
    for number, line in lines(path):
        try:
            yield f"{path}:{number}", parse_object(line)
        except DamagedJson as error:
            raise DataError(f"{path}:{number}: {error}; correct or remove the line") from error


def common_fields(row: Mapping[str, Any], where: str) -> tuple[str, int | None, int | None]:
    """Fields ``prompt``, ``height`` and ``width`` (pixels, both or none) of a row.

    Raises DataError also if ``category``, by which an evaluation groups its scores, is a list or an
    object.
    """
    prompt = row.get("prompt")
    height = row.get("height")
    width = row.get("width")
    category = row.get("category")
    if not isinstance(prompt, str) or not prompt.strip() or "\0" in prompt:
        raise DataError(f"{where}: field 'prompt' must be a text, got {prompt!r}")
    for side, value in (("height", height), ("width", width)):
        is_size = type(value) is int and 1 <= value <= _LARGEST_SIDE
        if value is not None and not is_size:
            raise DataError(
                f"{where}: field {side!r} must be an integer from 1 to {_LARGEST_SIDE}, "
                f"got {value!r}"
            )
    if (height is None) != (width is None):
        raise DataError(f"{where}: fields 'height' and 'width' must be given together")
    if isinstance(category, list | dict):
        raise DataError(f"{where}: field 'category' must be a text, got {category!r}")
    return prompt, height, width


def load_prompts(dataset: str | Path, split: str, kind: str = "geneval") -> list[Item]:
    """The items of one split, ``train`` or ``test``, of a folder; ``kind`` is one of ``KINDS``.

    Raises DataError.
    """
    folder = Path(dataset)
    if not folder.is_dir():
        hint = ""
        if folder.name.startswith("public-"):
            public_name = folder.name.removeprefix("public-")
            hint = f"; fetch it with `python dataset/fetch.py {public_name}`"
        raise DataError(
            f"prompt set {str(dataset)!r} (config.dataset) is no folder "
            f"(looked from {Path.cwd()}){hint}"
        )
    items = KINDS[kind](folder, split)
    if not items:
        raise DataError(f"prompt set {folder} has no item in its {split} split")
    return items


def _geneval(folder: Path, split: str) -> list[Item]:
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        name = f"{where} (item {row.get('idx', len(items))!r})"
        prompt, height, width = common_fields(row, name)
        criteria = row.get("criteria")
        if criteria is not None and not _are_criteria(criteria):
            raise DataError(
                f"{name}: field 'criteria' must look like {{dimension: {{name: text}}}}"
            )
        try:
            split_prompt(prompt)
        except PromptLayoutError as error:
            raise DataError(f"{name}: field 'prompt': {error}") from error
        items.append(Item(len(items), prompt, height, width, metadata=dict(row)))
    return items


def _are_criteria(value: Any) -> bool:
    """Whether it is ``{dimension: {name: text}}``; a text may be None."""
    if not isinstance(value, dict):
        return False
    for texts in value.values():
        if not isinstance(texts, dict):
            return False
        if not all(isinstance(text, str | None) for text in texts.values()):
            return False
    return True


def _text(folder: Path, split: str) -> list[Item]:
    lines_of_file = text_of(folder / f"{split}.txt").splitlines()
    prompts = [line.strip() for line in lines_of_file if line.strip()]
    return [Item(item_id=number, prompt=prompt) for number, prompt in enumerate(prompts)]


def _geneval_image(folder: Path, split: str) -> list[Item]:
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        prompt, height, width = common_fields(row, where)
        field = "images" if "images" in row else "image"
        names = row.get("images", [row.get("image")])
        if not isinstance(names, list) or not names or {"image", "images"} <= row.keys():
            raise DataError(
                f"{where}: field 'images' must be a list of paths from {folder}, "
                "in place of 'image'"
            )
        references = []
        for name in names:
            # os.path, because a text that is too long for a name is no error there.
            if not isinstance(name, str) or not os.path.isfile(folder / name):
                raise DataError(
                    f"{where}: field {field!r} must name a file in {folder}, got {name!r}"
                )
            source = f"{where}: field {field!r} ({name!r})"
            references.append(partial(read_reference, folder / name, source))
        items.append(Item(len(items), prompt, height, width, dict(row), tuple(references)))
    return items


def _arrow_editing(folder: Path, split: str) -> list[Item]:
    """Columns that are texts or numbers go into an item's metadata.

    The images are never all in memory.
    """
    path = folder / f"{split}.arrow"
    if not path.is_file():
        path = folder / f"{split}.parquet"
    if not path.is_file():
        raise DataError(
            f"neither {split}.arrow nor {split}.parquet is in {folder} "
            "(config.dataset, config.prompt_fn)"
        )
    items = []
    try:
        schema, pieces = _open_table(path)
        column = "images" if "images" in schema.names and "image" not in schema.names else "image"
        missing = {"prompt", column} - set(schema.names)
        if missing:
            raise DataError(
                f"{path}: column {max(missing)!r} is missing; it has {', '.join(schema.names)}"
            )
        plain_columns = []
        for field in schema:
            if not types.is_nested(field.type) and not types.is_binary(field.type):
                plain_columns.append(field.name)
        for read in pieces:
            rows = read(plain_columns).to_pylist()
            counts = [1] * len(rows)
            if column == "images":
                counts = compute.list_value_length(read([column]).column(0)).to_pylist()
            for row, (metadata, count) in enumerate(zip(rows, counts, strict=True)):
                where = f"{path}: row {len(items)}"
                prompt, height, width = common_fields(metadata, where)
                what = f"{where}: field {column!r}"
                if not count:
                    raise DataError(f"{what} has no image")
                references = []
                for number in range(count):
                    references.append(partial(_image_of_row, read, column, row, number, what))
                items.append(Item(len(items), prompt, height, width, metadata, tuple(references)))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read: {str(error).splitlines()[0]}; copy or download it again"
        ) from error
    return items


def _open_table(path: Path) -> tuple[Any, list[Callable[[list[str]], Any]]]:
    """The schema of an Arrow or Parquet file, and functions (columns → table) of its pieces."""
    source = pyarrow.memory_map(str(path))
    if path.suffix == ".parquet":
        mapped = source.read_buffer()
        file = pyarrow.parquet.ParquetFile(mapped)

        def read(number: int, columns: list[str]) -> Any:
            # Its own reader each time: rewards read images in several threads, and a ParquetFile is
            # not safe for that.
            return pyarrow.parquet.ParquetFile(mapped, metadata=file.metadata).read_row_group(
                number, columns
            )

        return file.schema_arrow, [partial(read, number) for number in range(file.num_row_groups)]
    try:  # ``datasets`` writes the stream format
        table = pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid:
        table = pyarrow.ipc.open_file(source).read_all()
    return table.schema, [batch.select for batch in table.to_batches()]


def _image_of_row(
    read: Callable[[list[str]], Any], column: str, row: int, number: int, what: str
) -> Image.Image:
    value = read([column]).column(0)[row].as_py()
    encoded = (value if isinstance(value, list) else [value])[number]
    encoded = encoded.get("bytes") if isinstance(encoded, dict) else encoded
    if not isinstance(encoded, bytes):
        raise DataError(f"{what} has no bytes; save the set with its images embedded")
    return read_reference(encoded, what)


def read_reference(source: Path | bytes, what: str) -> Image.Image:
    """RGB, upright according to its EXIF data. Raises DataError."""
    try:
        return read_image(source)
    except UnreadableImage as error:
        raise DataError(f"{what} {error}") from error


KINDS: dict[str, Callable[[Path, str], list[Item]]] = {
    "geneval": _geneval,
    "general_ocr": _text,
    "text": _text,
    "geneval_image": _geneval_image,
    "arrow_editing": _arrow_editing,
}


def item_size(item: Item, resolution: int, mode: str) -> tuple[int, int]:
    """Height and width in pixels of a generated item, before rounding to the model's multiple.

    ``mode``: ``exact``: the item's size unchanged; ``aspect``: its shape at area ``resolution``².
    """
    if item.height is None or item.width is None:
        return resolution, resolution
    if mode == "exact":
        return item.height, item.width
    scale = resolution / math.sqrt(item.height * item.width)
    return round(item.height * scale), round(item.width * scale)


def round_to_multiple(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Both sides rounded to the nearest multiple, at least one multiple each."""
    height, width = size
    rounded_height = max(multiple, round(height / multiple) * multiple)
    rounded_width = max(multiple, round(width / multiple) * multiple)
    return rounded_height, rounded_width
