"""JSON from outside (files of users, answers of servers): whatever is wrong with it is one error of one sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DamagedJson(ValueError):
    """Not usable as JSON; the message says why, without naming the source."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text; a byte order mark before it is skipped.

    Raises:
        DamagedJson: Not UTF-8 or not JSON, a key twice in one object, a character that is none, nesting or a number
            beyond what Python reads.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise DamagedJson(f"not UTF-8 (byte {error.object[error.start]:#x}); save it as UTF-8") from error
    except UnicodeEncodeError as error:
        raise DamagedJson(f"not JSON (half of the surrogate pair {error.object[error.start]!a})") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DamagedJson(f"not JSON ({error.msg} at {line}column {error.colno})") from error
    except RecursionError as error:
        raise DamagedJson("not usable: nested too deeply") from error
    except DamagedJson:
        raise
    except ValueError as error:
        raise DamagedJson("not usable: a number has too many digits") from error


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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DamagedJson(f"not usable: it has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found
