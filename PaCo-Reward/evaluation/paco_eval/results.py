"""Results files (JSON lines, one item each), what they record of the weights, and tables made from them."""

import errno
import fcntl
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pandas as pd

from paco_judge.json_io import DamagedJson, lines, parse_object

Row = dict[str, Any]

REMEDY = "move the file away or pass another --results_dir"
WEIGHT_FILES = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".pth", ".pt", ".tar")


class BenchError(RuntimeError):
    """The run cannot continue: benchmark, engine or results file. The message says what to do."""


class ItemError(RuntimeError):
    """One item cannot be scored; the run continues without it."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def key_of(row: Row) -> str:
    """The key of an item, or of a row that holds its fields."""
    return json.dumps(row, sort_keys=True)


class ResultsFile:
    """The results of one model on one benchmark; ``done`` holds the keys of its rows.

    A context manager. Entering it locks the file, reads what an earlier run wrote, and removes a line that a kill cut
    off, so that no row is lost or written twice.

    Args:
        file: The file.
        items: The fields that identify each of the benchmark's items.
        stamp: In every row: ``model``; ``asked``, the questions and their form; ``weights``, a hash of the model's
            files. Rows with other values are refused; where weights are recorded, the model's name does not count.
    """

    def __init__(self, file: Path, items: list[Row], stamp: Row) -> None:
        self.file, self.stamp = file, {name: value for name, value in stamp.items() if value is not None}
        self.known = {key_of(fields) for fields in items}
        self.fields = items[0].keys()
        self.done: set[str] = set()

    def __enter__(self) -> Self:
        """Raises BenchError if the file is in use, or holds rows of another model or benchmark; OSError."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._out = open(self.file, "a+b", buffering=0)
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BaseException as error:
            self._out.close()
            if isinstance(error, BlockingIOError):
                raise BenchError(f"another run is writing {self.file}; wait or pass another --results_dir") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._out.seek(0, 2) == 0:  # no row was written
            self.file.unlink(missing_ok=True)
        self._out.close()

    def append(self, row: Row) -> None:
        """Add a row. Raises OSError: The disk is full; a line that is cut then is removed by the next run."""
        line = json.dumps(self.stamp | row).encode("ascii") + b"\n"
        if self._out.write(line) < len(line):
            raise OSError(errno.ENOSPC, "the disk is full", str(self.file))
        self.done.add(key_of({name: row[name] for name in self.fields}))

    def _read(self) -> None:
        self._out.seek(0)
        raw = self._out.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        self._out.truncate(len(whole))
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            place = f"{self.file} line {number}"
            try:
                row = parse_object(line)
                key = key_of({name: row[name] for name in self.fields})
                recorded = self.stamp | {"model": row["model"]} | row
            except (ValueError, KeyError) as error:
                raise BenchError(f"{place} is not a result of this benchmark ({error!r}); {REMEDY}") from error
            weighed = "weights" in row and "weights" in self.stamp
            for name in sorted(self.stamp.keys() - {"model" if weighed else "weights"}):
                if recorded[name] != self.stamp[name]:
                    raise BenchError(
                        f"{place} is a result of {name} {recorded[name]}, not {self.stamp[name]}; {REMEDY}"
                    )
            if key not in self.known:
                raise BenchError(f"{place} is about item {key} of another benchmark; {REMEDY}")
            self.done.add(key)


def fingerprint(*places: str | Path | None) -> str | None:
    """``sha256:…`` of the content of models and adapters, wherever they lie; None if no file is found.

    Args:
        places: Folders (without their subfolders), single files, or hub names, of which the files in the local cache
            count.
    """
    files = [file for place in places if place is not None for file in _weight_files(place)]
    if sum(file.stat().st_size for file in files) > 10**9:
        print("hashing the model's weights", file=sys.stderr, flush=True)
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            total.update(f"{file.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return f"sha256:{total.hexdigest()[:32]}" if files else None


def _weight_files(place: str | Path) -> list[Path]:
    path = Path(place)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(str(place), local_files_only=True))
        except (ImportError, OSError, ValueError):  # not in the cache, or no hub name
            return []
    return sorted(file for file in path.iterdir() if file.suffix in WEIGHT_FILES and file.is_file())


def read_jsonl(file: Path) -> list[Row]:
    """The rows of a JSON lines file. Raises BenchError, which names a line that is not a JSON object."""
    rows, number = [], 0
    try:
        for number, line in lines(file):
            rows.append(parse_object(line))
    except (OSError, DamagedJson) as error:
        raise BenchError(f"dataset {file} line {number} cannot be read: {error}") from error
    return rows


def read_results(results_dir: Path, parse: Callable[[Row], Row], script: str) -> pd.DataFrame:
    """A row for each line of every results file of a folder; column ``model`` is the file's name without ``.jsonl``.

    Args:
        results_dir: Folder of results files.
        parse: The columns that a table needs; ValueError, KeyError or TypeError mark a line as invalid.
        script: The command that writes results files, for error messages.

    Raises:
        BenchError: No results, or an invalid line.
    """
    found: list[Row] = []
    for file in sorted(results_dir.glob("*.jsonl")):
        for number, line in lines(file):
            try:
                found.append({"model": file.stem} | parse(parse_object(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(f"{file} line {number} is not a result of {script}: {error!r}") from error
    if not found:
        raise BenchError(f"no results (*.jsonl) in {results_dir}; run {script} first")
    return pd.DataFrame(found)


def as_text(table: pd.DataFrame) -> str:
    """Aligned columns; numbers with four digits, ``-`` for none."""
    return table.to_string(index=False, na_rep="-", float_format="{:.4f}".format) + "\n"


def as_latex(table: pd.DataFrame, names: int = 1) -> str:
    """A booktabs tabular; the first ``names`` columns are left-aligned, the others right-aligned."""
    columns = "l" * names + "r" * (len(table.columns) - names)
    text = table.to_latex(index=False, na_rep="-", float_format="%.4f", escape=True, column_format=columns)
    return text.replace("±", r"$\pm$")


def write_tables(output: Path | str, *tables: pd.DataFrame, names: int = 1) -> str:
    """Write ``<output>.txt`` and ``<output>.tex`` (not by with_suffix: a name may be v1.5); returns the text."""
    text = "\n".join(map(as_text, tables))
    Path(f"{output}.txt").write_text(text, encoding="utf-8")
    Path(f"{output}.tex").write_text("\n".join(as_latex(table, names) for table in tables), encoding="utf-8")
    return text
