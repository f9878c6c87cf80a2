"""JSON from outside: whatever is wrong with it is one error of one sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DamagedJson(ValueError):
    """Not usable as JSON; the message does not name the source."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises DamagedJson."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return value
    except (ValueError, RecursionError) as error:
        raise DamagedJson(f"not JSON ({error})") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """``parse``, and the value must be a JSON object. Raises DamagedJson."""
    value = parse(text)
    if not isinstance(value, dict):
        raise DamagedJson(f"not a JSON object but a {type(value).__name__}")
    return value


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of every line that is not blank; only a line feed ends one."""
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line
