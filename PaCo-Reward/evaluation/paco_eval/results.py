"""Results files (JSON lines, one item each), the tables made from them, and the errors of a run."""

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Self

from paco_judge.json_io import DamagedJson, lines, parse_object

Row = dict[str, Any]
Table = list[list[str]]  # headings in the first row

REMEDY = "move the file away or pass another --results_dir"


class BenchError(RuntimeError):
    """The run cannot continue: benchmark, engine or results file. The message says what to do."""


class ItemError(RuntimeError):
    """One item cannot be scored; the run continues without it."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ResultsFile:
    """The results of one model on one benchmark; ``done`` holds the keys of its rows.

    A context manager. Entering it reads what an earlier run wrote, removes a line that a kill cut off, and locks the
    file, so that no row is lost or written twice.
    """

    def __init__(
        self,
        file: Path,
        model: str,
        known: Collection[tuple],
        key_of: Callable[[Row], tuple],
        asked: Row | None = None,
        weights: Callable[[], str | None] = lambda: None,
    ):
        """
        Args:
            file: The file.
            model: The model's name. Of rows that record weights, the weights count instead.
            known: Keys of the benchmark's items.
            key_of: Key of a row.
            asked: Questions and their form.
            weights: Gives a hash of the model's configuration and weights; None where they are not known (yet).
        """
        self.file, self.known, self.key_of = file, frozenset(known), key_of
        self.stamp = {"model": model} | ({"asked": asked} if asked else {})
        self.done: set[tuple] = set()
        self._hash, self._weights, self._recorded = weights, None, None

    def __enter__(self) -> Self:
        """Raises BenchError if the file is not writable, in use, or holds rows of another model or benchmark."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._out = open(self.file, "a+b", buffering=0)
        except OSError as error:
            raise BenchError(f"{self.file} cannot be written ({error}); pass another --results_dir") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._out.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._out.seek(0, 2) == 0:  # no row was written
            self.file.unlink(missing_ok=True)
        self._out.close()

    def append(self, row: Row) -> None:
        """Add a row in one write. Raises BenchError if the weights are not those of earlier rows."""
        self._identify(self._recorded)  # a model of the hub is there only now
        weights = {"weights": self._weights} if self._weights else {}
        line = json.dumps({**self.stamp, **weights, **row}).encode("ascii") + b"\n"
        try:
            if self._out.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a line that was cut off is removed when the file is opened again
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cause = "the disk is full; free some space" if full else str(error.strerror)
            raise BenchError(
                f"{self.file} cannot be written: {cause}, and run the same command again: its {len(self.done)} results "
                "are kept"
            ) from error
        self.done.add(self.key_of(row))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BenchError(f"another run is writing {self.file}; wait for it or pass another --results_dir") from None
        except OSError:
            pass  # the file system has no locks

    def _identify(self, recorded: object) -> bool:
        """Whether the weights are known to be the ``recorded`` ones. Raises BenchError if they are others."""
        self._weights = self._weights or self._hash()
        if None not in (recorded, self._weights) and recorded != self._weights:
            raise BenchError(
                f"{self.file} holds results of other weights ({recorded}) than {self.stamp['model']} has now "
                f"({self._weights}); {REMEDY} to score it"
            )
        return None not in (recorded, self._weights)

    def _read(self) -> None:
        self._out.seek(0)
        raw = self._out.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):
            self._out.truncate(len(whole))
        unknown = 0
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            place = f"{self.file} line {number}"
            try:
                row = parse_object(line)
                key, stamp = self.key_of(row), self.stamp | {"model": row["model"]} | row
                hash(key)
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(f"{place} is not a result of this benchmark ({error!r}); {REMEDY}") from error
            self._recorded = row.get("weights")
            same = self._identify(self._recorded)
            unknown += self._recorded is None
            for name, value in self.stamp.items():
                if stamp[name] != value and not (same and name == "model"):
                    raise BenchError(f"{place} is a result of {name} {stamp[name]}, not {value}; {REMEDY}")
            if key not in self.known:
                raise BenchError(f"{place} is about item {' '.join(map(str, key))} of another benchmark; {REMEDY}")
            self.done.add(key)
        if unknown and self._weights:
            print(
                f"warning: {unknown} rows of {self.file} do not record which weights gave them (an older version wrote "
                f"them) and are taken as results of {self.stamp['model']}; if that changed since, {REMEDY}",
                file=sys.stderr,
            )


def read_jsonl(file: Path) -> list[Row]:
    """The rows of a JSON lines file. Raises BenchError, which names a line that is not a JSON object."""
    rows, number = [], 0
    try:
        for number, line in lines(file):
            rows.append(parse_object(line))
    except (OSError, DamagedJson) as error:
        raise BenchError(f"dataset {file} line {number} cannot be read: {error}") from error
    return rows


def read_results(results_dir: Path, parse: Callable[[Row], Row], script: str) -> dict[str, list[Row]]:
    """The rows of every results file of a folder, by file name without ``.jsonl``.

    Args:
        results_dir: Folder of results files.
        parse: What a table needs of a row; ValueError, KeyError or TypeError mark a row as invalid.
        script: The command that writes results files, for error messages.

    Raises:
        BenchError: No results, or an invalid line.
    """
    found: dict[str, list[Row]] = {}
    for file in sorted(results_dir.glob("*.jsonl")):
        for number, line in lines(file):
            try:
                found.setdefault(file.stem, []).append(parse(parse_object(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(f"{file} line {number} is not a result of {script}: {error!r}") from error
    if not found:
        raise BenchError(f"no results (*.jsonl) in {results_dir}; run {script} first")
    return found


def as_text(table: Table) -> str:
    """Columns aligned by spaces."""
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]) + "\n"


LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "_%&#${}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"[": "{[}", "*": "{*}"}  # at the start of a row LaTeX reads them as an option of the previous row's \\
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}
)


def as_latex(table: Table, names: int = 1) -> str:
    """A booktabs tabular; the first ``names`` columns are left-aligned, the others right-aligned."""
    rows = [" & ".join(cell.translate(LATEX) for cell in row) + r" \\" for row in table]
    columns = "l" * names + "r" * (len(table[0]) - names)
    head = [r"\begin{tabular}{" + columns + "}", r"\toprule", rows[0], r"\midrule"]
    return "\n".join([*head, *rows[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"
