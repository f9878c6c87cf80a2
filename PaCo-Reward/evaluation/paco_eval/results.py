"""The file that a run appends to: JSON lines, one item each."""

import fcntl
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Self

from paco_eval.errors import BenchError


class ResultsFile:
    """The results of one model on one benchmark; `done` holds the keys of the items that it has.

    A context manager: entering reads what an earlier run wrote, removes a line that a kill cut off, and keeps other
    processes out, so that no row is lost and none is written twice.
    """

    def __init__(self, file: Path, model: str, known: Collection[tuple], key_of: Callable[[dict[str, Any]], tuple]):
        """`known`: the keys of the benchmark's items; `key_of`: a row's key."""
        self.file, self.model, self.known, self.key_of = file, model, frozenset(known), key_of
        self.done: set[tuple] = set()

    def __enter__(self) -> Self:
        """Raises BenchError: not writable, in use, not JSON lines, or of another model or benchmark."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._out = open(self.file, "a+b")
        except OSError as error:
            raise BenchError(f"{self.file} cannot be written ({error}); name another --results_dir") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._out.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._out.seek(0, 2) == 0:  # nothing came of it
            self.file.unlink(missing_ok=True)
        self._out.close()

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, in one write, and hand it to the system."""
        self._out.write(json.dumps({"model": self.model, **row}).encode("ascii") + b"\n")
        self._out.flush()
        self.done.add(self.key_of(row))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BenchError(f"another run is writing {self.file}; wait for it or name another --results_dir") from None
        except OSError:
            pass  # a file system without locks: nothing more can be done there

    def _read(self) -> None:
        self._out.seek(0)
        raw = self._out.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):
            self._out.truncate(len(whole))
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            self.done.add(self._checked(line, f"{self.file} line {number}"))

    def _checked(self, line: bytes, place: str) -> tuple:
        """The key of a line that belongs here."""
        remedy = "move the file away or name another --results_dir"
        try:
            row = json.loads(line)
            key, model = self.key_of(row), row["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{place} is not a result of this benchmark ({error!r}); {remedy}") from error
        if model != self.model:
            raise BenchError(f"{place} is of model {model}; {remedy}")
        if key not in self.known:
            raise BenchError(f"{place} is of item {' '.join(map(str, key))} of another benchmark; {remedy}")
        return key
