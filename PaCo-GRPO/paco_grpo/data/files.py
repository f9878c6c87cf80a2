"""Reading prompt files; errors name file, line and field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paco_judge.json_io import DamagedJson, lines, parse_object

_LARGEST_SIDE = 1 << 16  # pixels


class DataError(ValueError):
    """A prompt set that cannot be used; the message names file, line and field."""


def text_of(path: Path) -> str:
    """The text without a byte order mark.

    Raises:
        DataError: The file does not exist, is not UTF-8, or holds NUL bytes (UTF-16).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise _missing(path) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from error
    if "\0" in text:
        raise DataError(f"{path}: not a text (NUL byte); save it as UTF-8")
    return text


def _missing(path: Path) -> DataError:
    return DataError(f"prompt file {path} does not exist; config.dataset names its folder, config.prompt_fn its kind")


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file:line``, object) of every non-empty line.

    Raises:
        DataError: No such file, or a line is not a JSON object.
    """
    if not path.is_file():
        raise _missing(path)
    for number, line in lines(path):
        try:
            yield f"{path}:{number}", parse_object(line)
        except DamagedJson as error:
            raise DataError(f"{path}:{number}: {error}; correct or remove the line") from error


def common_fields(row: Mapping[str, Any], where: str) -> tuple[str, int | None, int | None]:
    """Fields ``prompt``, ``height`` and ``width`` of a row; the size in pixels, both sides or none.

    Raises:
        DataError: The prompt is missing, empty or holds a NUL; a side is alone or not a positive integer; or ``category``,
            by which an evaluation groups its scores, is a list or an object.
    """
    prompt, height, width, category = (row.get(name) for name in ("prompt", "height", "width", "category"))
    if not isinstance(prompt, str) or not prompt.strip() or "\0" in prompt:
        raise DataError(f"{where}: field 'prompt' must be a text, got {prompt!r}")
    for side, value in (("height", height), ("width", width)):
        if value is not None and (type(value) is not int or not 1 <= value <= _LARGEST_SIDE):
            raise DataError(f"{where}: field {side!r} must be an integer from 1 to {_LARGEST_SIDE}, got {value!r}")
    if (height is None) != (width is None):
        raise DataError(f"{where}: fields 'height' and 'width' must be given together")
    if isinstance(category, list | dict):
        raise DataError(f"{where}: field 'category' must be a text, got {category!r}")
    return prompt, height, width
