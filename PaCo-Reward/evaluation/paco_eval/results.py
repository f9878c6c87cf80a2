"""Results files (JSON lines, one item each), what they record of the weights, and tables made from them."""

import fcntl
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
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


class ResultsFile:
    """The results of one model on one benchmark; ``done`` holds the keys of its rows.

    A context manager. Entering it locks the file, reads what an earlier run wrote, and removes a line that a kill cut
    off, so that no row is lost or written twice.

    Args:
        file: The file.
        model: The model's name. Of rows that record weights, the weights count instead.
        known: Keys of the benchmark's items.
        key_of: Key of a row.
        asked: Questions and their form.
        weights: Returns a hash of the model's configuration and weights; None where they are not known (yet).
    """

    def __init__(
        self,
        file: Path,
        model: str,
        known: Collection[tuple],
        key_of: Callable[[Row], tuple],
        asked: Row | None = None,
        weights: Callable[[], str | None] = lambda: None,
    ) -> None:
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
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            self._out.close()
            raise BenchError(f"another run is writing {self.file}; wait or pass another --results_dir") from error
        except BaseException:
            self._out.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._out.seek(0, 2) == 0:  # no row was written
            self.file.unlink(missing_ok=True)
        self._out.close()

    def append(self, row: Row) -> None:
        """Add a row in one write. Raises BenchError: The weights are not those of earlier rows, or the disk is full."""
        self._check_weights(self._recorded)  # a model of the hub is there only now
        weights = {"weights": self._weights} if self._weights else {}
        line = json.dumps({**self.stamp, **weights, **row}).encode("ascii") + b"\n"
        try:
            written = self._out.write(line)
        except OSError as error:
            raise BenchError(f"{self.file} cannot be written: {error}; its {len(self.done)} results are kept") from error
        if written < len(line):  # the cut line is removed when the file is opened again
            raise BenchError(f"the disk is full: {self.file} keeps its {len(self.done)} results; free some space")
        self.done.add(self.key_of(row))

    def _check_weights(self, recorded: object) -> bool:
        """Whether the weights are known to be the ``recorded`` ones. Raises BenchError if they are others."""
        self._weights = self._weights or self._hash()
        known = None not in (recorded, self._weights)
        if known and recorded != self._weights:
            raise BenchError(
                f"{self.file} holds results of other weights ({recorded}) than {self.stamp['model']} has now "
                f"({self._weights}); {REMEDY} to score it"
            )
        return known

    def _read(self) -> None:
        self._out.seek(0)
        raw = self._out.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) != len(raw):
            self._out.truncate(len(whole))
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            place = f"{self.file} line {number}"
            try:
                row = parse_object(line)
                key, stamp = self.key_of(row), self.stamp | {"model": row["model"]} | row
                hash(key)
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(f"{place} is not a result of this benchmark ({error!r}); {REMEDY}") from error
            self._recorded = row.get("weights")
            same = self._check_weights(self._recorded)
            for name, value in self.stamp.items():
                if stamp[name] != value and not (same and name == "model"):
                    raise BenchError(f"{place} is a result of {name} {stamp[name]}, not {value}; {REMEDY}")
            if key not in self.known:
                raise BenchError(f"{place} is about item {' '.join(map(str, key))} of another benchmark; {REMEDY}")
            self.done.add(key)


def fingerprint(folders: Iterable[str | Path | None]) -> str | None:
    """``sha256:…`` of the content of all files of models and adapters, wherever they lie; None if none is found.

    Args:
        folders: Folders (without their subfolders), single files, or hub names, of which the files in the local cache
            count.
    """
    files = [file for folder in folders if folder is not None for file in _weight_files(folder)]
    if sum(file.stat().st_size for file in files) > 10**9:
        print("hashing the model's weights", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
        digests = list(pool.map(_digest, files))
    total = hashlib.sha256("".join(f"{f.name}\0{d}\n" for f, d in zip(files, digests, strict=True)).encode())
    return f"sha256:{total.hexdigest()[:32]}" if files else None


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _weight_files(name: str | Path) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = (try_to_load_from_cache(str(name), f"{kind}config.json") for kind in ("", "adapter_"))
            path = next((Path(file).parent for file in cached if isinstance(file, str)), None)
        except (ImportError, ValueError):  # ValueError: it cannot be a hub name
            path = None
    return sorted(file for file in path.iterdir() if file.suffix in WEIGHT_FILES and file.is_file()) if path else []


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
