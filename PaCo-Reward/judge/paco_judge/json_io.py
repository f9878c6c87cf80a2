"""JSON from outside (files of users, answers of servers): whatever is wrong with it is one error of one sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DamagedJson(ValueError):
    """Not usable as JSON; the message says why, without naming the source."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; a byte order mark before it is skipped. Raises DamagedJson."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text.removeprefix("\ufeff"))
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return value
    except UnicodeDecodeError as error:
        raise DamagedJson(f"not UTF-8 (byte {error.object[error.start]:#x}); save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DamagedJson(f"not JSON ({error})") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """``parse``, and the value must be a JSON object. Raises DamagedJson."""
    value = parse(text)
    if not isinstance(value, dict):
        raise DamagedJson(f"not a JSON object but a {type(value).__name__}")
    return value


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of every line that is not blank. Only a line feed ends a line: texts may hold others."""
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line
