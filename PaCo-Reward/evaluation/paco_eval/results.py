"""Results files (JSON lines, one item each), and tables made from them."""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from paco_judge.json_io import lines, parse_object

Row = dict[str, Any]

WEIGHT_FILES = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin")


class BenchError(ValueError):
    """The run cannot continue: benchmark, engine or results file. The message says what to do."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def key_of(row: Row) -> str:
    """The fields of an item as one string."""
    return json.dumps(row, sort_keys=True)


def read_rows(file: Path, convert: Callable[[Row], Any] = dict) -> list[Any]:
    """``convert`` of every row of a JSON lines file. Raises BenchError, naming the line that is not such a row."""
    rows, number = [], 0
    try:
        for number, line in lines(file):
            rows.append(convert(parse_object(line)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{file} line {number} cannot be used: {type(error).__name__}: {first_line(error)}"
        ) from error
    return rows


@contextmanager
def open_results(
    file: Path, items: list[Row], stamp: Row
) -> Iterator[tuple[set[str], Callable[[Row], None]]]:
    """The keys of the rows in a results file, and a function that adds a row. A line that a kill cut off is removed.

    Args:
        file: The results of one model on one benchmark.
        items: The fields that identify each of the benchmark's items.
        stamp: In every row: ``model``; ``asked``, the questions and their form; ``weights``, a hash of the model's
            files. Of a row with weights the model's name does not count; one without, from before a download or from
            a server, needs the same name.

    Raises BenchError: The file is in use, or holds rows with another stamp or of another benchmark.
    """
    stamp = {name: value for name, value in stamp.items() if value is not None}
    known = set(map(key_of, items))

    def key(row: Row) -> str:
        own = key_of({name: row[name] for name in items[0]})
        compared = sorted(
            stamp.keys() - {"model" if "weights" in row and "weights" in stamp else "weights"}
        )
        other = [
            f"{name} {row.get(name)}, not {stamp[name]}"
            for name in compared
            if row.get(name) != stamp[name]
        ]
        if other or own not in known:
            what = other[0] if other else f"another benchmark's item {own}"
            raise ValueError(
                f"a result of {what}; move the file away or pass another --results_dir"
            )
        return own

    def append(row: Row) -> None:
        out.write(json.dumps(stamp | row).encode("ascii") + b"\n")
        out.flush()

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BenchError(
                f"another run is writing {file}; wait or pass another --results_dir"
            ) from error
        out.truncate(file.read_bytes().rfind(b"\n") + 1)
        yield set(read_rows(file, key)), append


def fingerprint(*places: str | Path) -> str | None:
    """``sha256:…`` of what models and adapters hold: folders, or hub names in the local cache. None without any."""
    files = []
    for path in map(Path, places):
        if not path.exists():
            try:
                from huggingface_hub import snapshot_download

                path = Path(snapshot_download(str(path), local_files_only=True))
            except (ImportError, OSError, ValueError):  # not in the cache, or no hub name
                continue
        files += sorted(
            file for file in path.iterdir() if file.suffix in WEIGHT_FILES and file.is_file()
        )
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            total.update(
                f"{file.name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode()
            )
    return f"sha256:{total.hexdigest()[:32]}" if files else None


def read_results(results_dir: Path, columns: Callable[[Row], Row]) -> pd.DataFrame:
    """``columns`` of each line of a folder's results files, and ``model``, the file's name without ``.jsonl``."""
    files = sorted(results_dir.glob("*.jsonl"))
    found = [{"model": file.stem} | row for file in files for row in read_rows(file, columns)]
    if not found:
        raise BenchError(f"no results (*.jsonl) in {results_dir}; run the benchmark first")
    return pd.DataFrame(found)


def as_text(table: pd.DataFrame) -> str:
    """Aligned columns; numbers with four digits, ``-`` for none."""
    return table.to_string(index=False, na_rep="-", float_format="{:.4f}".format) + "\n"


def as_latex(table: pd.DataFrame) -> str:
    """A booktabs tabular."""
    return table.to_latex(index=False, na_rep="-", float_format="%.4f", escape=True).replace(
        "±", r"$\pm$"
    )


def write_tables(output: str, *tables: pd.DataFrame) -> None:
    """Print the tables, and write them to ``<output>.txt`` and ``<output>.tex``."""
    text = "\n".join(map(as_text, tables))
    Path(f"{output}.txt").write_text(
        text, encoding="utf-8"
    )  # not by with_suffix: a name may be v1.5
    Path(f"{output}.tex").write_text("\n".join(map(as_latex, tables)), encoding="utf-8")
    print(text, end="")
