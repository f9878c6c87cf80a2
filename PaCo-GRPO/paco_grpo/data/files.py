"""Reading prompt files; errors name file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A prompt set that cannot be used; the message names file, line and field."""


def text_of(path: Path) -> str:
    """
    Raises:
        DataError: The file does not exist, or is not UTF-8.
    """
    if not path.is_file():
        raise DataError(
            f"prompt file {path} does not exist; config.dataset names its folder, config.prompt_fn its kind"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte {error.object[error.start]:#x}); save it as UTF-8") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``file:line``, object) of every non-empty line.

    Raises:
        DataError: No such file, or a line is not a JSON object.
    """
    # Not splitlines(): JSON allows U+2028 in a text.
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: a line must be a JSON object with a field 'prompt', got {type(row).__name__}")
        yield where, row


def prompt_of(row: Mapping[str, Any], where: str) -> str:
    """Field ``prompt`` of a row.

    Raises:
        DataError: It is missing or empty.
    """
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where}: field 'prompt' must be a text, got {prompt!r}")
    return prompt


def given_size(row: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    """Fields ``height`` and ``width`` of a row in pixels, both or none.

    Raises:
        DataError: One of them alone, or not a positive integer.
    """
    height, width = row.get("height"), row.get("width")
    for side, value in (("height", height), ("width", width)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise DataError(f"{where}: field {side!r} must be a positive integer, got {value!r}")
    if (height is None) != (width is None):
        raise DataError(f"{where}: fields 'height' and 'width' must be given together")
    return height, width
