"""Files that this repository's programs write: locks, whole files, journals."""

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from paco_judge.errors import UserError


@contextmanager
def locked(place: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Keep other processes out of ``place`` until the block or this process ends.

    Args:
        place: A folder that exists, or a file in one.
        wait_s: Seconds for another process to leave it.

    Raises:
        UserError: Another process uses it.
    """
    lock_file = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        raise UserError(f"another process uses {place}; wait for it, or name another") from None
    try:
        yield
    finally:
        lock.release()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path``; a kill or a power loss leaves the old file or the new one.

    The content goes to a hidden file beside it, reaches the disk, and is then renamed.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` permanent: a rename reaches the disk with its folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Journal:
    """A JSON-lines file of results that a killed program continues.

    A context manager; nobody else writes the file meanwhile. Without a row there is no file.

    Args:
        file: One JSON object a line. A last line that a kill cut off is removed.
        sync: Whether a row is on the disk when ``append`` returns; else a power loss may take it.

    Attributes:
        rows: What the file holds, in its order.

    Raises:
        UserError: A line is damaged, or another process writes the file.
    """

    def __init__(self, file: Path, sync: bool = False) -> None:
        self.path = file
        self._sync = sync
        self.rows: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(self.path))
            self._file = stack.enter_context(self.path.open("a+b"))
            whole, line_feed, _ = self.path.read_bytes().rpartition(b"\n")
            self._file.truncate(len(whole) + len(line_feed))
            self.rows = read_json_lines(self.path)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.rows:
            self.path.unlink()
        self._stack.close()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        self.rows.append(row)
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())


def read_text(file: Path) -> str:
    """The text in a file, without a byte order mark. Raises UserError: It is none in UTF-8."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not a text in UTF-8: {error}") from error
    if "\0" in text:  # UTF-16 without its mark, or no text
        raise UserError(f"{file} is not a text in UTF-8: it has zero bytes")
    return text


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; blank lines are skipped.

    Raises:
        UserError: A line holds no JSON object; the message names it.
    """
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{file} line {number} is not a JSON object")
        rows.append(row)
    return rows


def write_json_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """``write_atomically`` with a line for each row, in a folder that may not exist yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomically(file, "".join(lines))


def read_json(file: Path) -> Any:
    """The value in a JSON file. Raises UserError: It is not JSON; the message names it."""
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error


def read_json_rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON list, or of JSON lines, whatever the file's suffix.

    Raises:
        UserError: It is neither; the message names the file.
    """
    start = file.read_bytes().removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if start != b"[":
        return read_json_lines(file)
    rows = read_json(file)
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file} holds other things than JSON objects")
    return rows


def write_json(file: Path, content: Any) -> None:
    """``write_atomically`` as JSON for people, too, in a folder that may not exist yet."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def hash_value(value: Any) -> str:
    """SHA-256 (hexadecimal) of a value that JSON can hold; other objects count as their text."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
