"""Results files (JSON lines, one item each), and tables made from them."""

import fcntl
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pandas as pd

from paco_judge.json_io import lines, parse_object

Row = dict[str, Any]

WEIGHT_FILES = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin")


class BenchError(ValueError):
    """The run cannot continue: benchmark, engine or results file. The message says what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def problem_of(error: Exception) -> str:
    """What is wrong with a row, of the error that reading it raised."""
    return f"its row lacks {error}" if isinstance(error, KeyError) else first_line(error)


def key_of(row: Row) -> str:
    """The fields of an item as one string."""
    return json.dumps(row, sort_keys=True)


def read_rows(file: Path, convert: Callable[[Row], Any] = dict) -> list[Any]:
    """``convert`` of every row of a JSON lines file.

    Raises:
        BenchError: The file cannot be read, or ``convert`` refuses a row; the line is named.
    """
    rows = []
    number = 0
    try:
        for number, line in lines(file):
            rows.append(convert(parse_object(line)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{file} line {number} cannot be used: {problem_of(error)}") from error
    return rows


class ResultsFile:
    """The results of one model on one benchmark, locked and complete lines only while open.

    Args:
        file: JSON lines. A last line that a kill cut off is removed.
        items: The fields that identify each of the benchmark's items.
        stamp: In every row: ``model``; ``asked``, the questions and their form; ``weights``, a hash
            of the model's files. A row with weights is matched by them, whatever the model's name.
            A row without (of a server, or not downloaded yet) is matched by the name.

    Raises:
        BenchError: The file is in use, or holds rows with another stamp or of another benchmark.
    """

    def __init__(self, file: Path, items: Sequence[Row], stamp: Row) -> None:
        self.done: set[str] = set()  # keys of the items that have a row
        self._file = file
        self._stamp = {name: value for name, value in stamp.items() if value is not None}
        self._names = list(items[0])
        self._known = {key_of(fields) for fields in items}

    def __enter__(self) -> Self:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._out = self._file.open("a+b")
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._out.truncate(self._file.read_bytes().rfind(b"\n") + 1)
            self.done = set(read_rows(self._file, self._checked_key))
        except BlockingIOError as error:
            self._out.close()
            raise BenchError(
                f"another run is writing {self._file}; wait or pass another --results_dir"
            ) from error
        except BenchError:
            self._out.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._out.close()

    def append(self, row: Row) -> None:
        """Write the row of an item; it is in the file when this returns."""
        self._out.write(json.dumps(self._stamp | row).encode("ascii") + b"\n")
        self._out.flush()

    def _checked_key(self, row: Row) -> str:
        """The key of a row that belongs to this run. Raises ValueError: It does not."""
        both_have_weights = "weights" in row and "weights" in self._stamp
        ignored = "model" if both_have_weights else "weights"
        for name in sorted(self._stamp):
            if name != ignored and row.get(name) != self._stamp[name]:
                raise _foreign(f"{name} {row.get(name)}, not {self._stamp[name]}")
        key = key_of({name: row[name] for name in self._names})
        if key not in self._known:
            raise _foreign(f"another benchmark's item {key}")
        return key


def _foreign(what: str) -> ValueError:
    return ValueError(f"it is a result of {what}; move the file away or pass another --results_dir")


def fingerprint(*places: str | Path) -> str | None:
    """``sha256:…`` of what models and adapters hold.

    Args:
        places: Folders, or hub names in the local cache.

    Returns:
        None if none of them has files here.
    """
    files = []
    for place in places:
        folder = Path(place)
        if not folder.exists():
            try:
                from huggingface_hub import snapshot_download

                folder = Path(snapshot_download(str(place), local_files_only=True))
            except (ImportError, OSError, ValueError):  # not in the cache, or no hub name
                continue
        for file in sorted(folder.iterdir()):
            if file.suffix in WEIGHT_FILES and file.is_file():
                files.append(file)
    if not files:
        return None
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        total.update(f"{file.name}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()[:32]}"


def read_results(results_dir: Path, columns: Callable[[Row], Row]) -> pd.DataFrame:
    """The rows of a folder's results files.

    Args:
        results_dir: With ``*.jsonl``.
        columns: The columns of the table, from a row. ``model``, the file's name, is added.
    """
    rows = []
    for file in sorted(results_dir.glob("*.jsonl")):
        rows += [{"model": file.stem} | row for row in read_rows(file, columns)]
    if not rows:
        raise BenchError(f"no results (*.jsonl) in {results_dir}; run the benchmark first")
    return pd.DataFrame(rows)


def as_text(table: pd.DataFrame) -> str:
    """Aligned columns; numbers with four digits, ``-`` for none."""
    return table.to_string(index=False, na_rep="-", float_format="{:.4f}".format) + "\n"


def as_latex(table: pd.DataFrame) -> str:
    """A booktabs tabular."""
    text = table.to_latex(index=False, na_rep="-", float_format="%.4f", escape=True)
    return text.replace("±", r"$\pm$")


def write_tables(output: str, *tables: pd.DataFrame) -> None:
    """Print the tables, and write them to ``<output>.txt`` and ``<output>.tex``."""
    text = "\n".join(as_text(table) for table in tables)
    latex = "\n".join(as_latex(table) for table in tables)
    # Not by with_suffix: a name may be v1.5.
    Path(f"{output}.txt").write_text(text, encoding="utf-8")
    Path(f"{output}.tex").write_text(latex, encoding="utf-8")
    print(text, end="")
