"""What a benchmark is, one loop for all (items become pairs, scores, rows of a results file), tables
of results files, and data sets of edits.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from PIL import Image
from tqdm import tqdm

from paco_eval.engines import ScorePairs, ask_once, make_engine
from paco_judge.errors import UserError, run_command
from paco_judge.files import Journal, fingerprint, read_json_lines
from paco_judge.images import UnreadableImage, read_image
from paco_judge.questions import Pair, Question, form_of, record
from paco_judge.verdict import Verdict

Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One row of a benchmark."""

    fields: Row  # identify it in a results file
    row: Row  # as the benchmark's files have it


class Benchmark(Protocol):
    """What is asked about each item, and what follows from the scores."""

    def items(self) -> Sequence[Item]:
        """All items; their images are not read yet."""

    def pairs(self, item: Item) -> list[Pair]:
        """What is asked about an item.

        Everything that ``result`` needs is checked here, before anything is asked.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: The item is damaged.
        """

    def result(self, item: Item, scores: Sequence[float]) -> Row:
        """The item's row in the results, without ``fields``, from P(Yes) of each of its pairs."""


def exit_status(
    command: Callable[[argparse.Namespace], int | None], args: argparse.Namespace
) -> int:
    """The exit status of a command that returns the number of items without a result."""
    return run_command(lambda: 1 if command(args) else 0, ValueError, OSError)


def run_judge(
    args: argparse.Namespace,
    benchmark: Benchmark,
    questions: Sequence[Question],
    suffix: str,
    **asked: Any,
) -> int:
    """``score_benchmark`` with the judge of the options of ``parse``.

    Args:
        args: The command line.
        benchmark: What is scored.
        questions: Are recorded in each row, with ``asked``.
        suffix: Stands after the judge's name in the name of the results file.
    """
    short_names = []
    exact_names = []
    weights = []
    for place in filter(None, (args.model, args.adapter)):
        short_names.append(Path(os.path.abspath(place)).name)
        # Checkpoints may share a folder name, so rows hold the whole path.
        exact_names.append(str(Path(place).resolve()) if Path(place).is_dir() else place)
        weights.append(None if args.server else fingerprint(place))
    stamp = {
        "model": " + ".join(exact_names),
        "asked": record(questions, form_of(args)) | asked,
        "weights": weights,
    }
    file = Path(args.results_dir) / f"{'+'.join(short_names)}{suffix}.jsonl"

    def load_engine() -> ScorePairs:
        return ask_once(make_engine(args))  # EditReward-Bench repeats edits

    return score_benchmark(benchmark, file, stamp, load_engine, args.batch_size)


def score_benchmark(
    benchmark: Benchmark,
    file: Path,
    stamp: Row,
    load_engine: Callable[[], ScorePairs],
    batch_size: int,
) -> int:
    """Append a row to ``file`` for every item that has none.

    Args:
        benchmark: What is scored.
        file: The results. Results of another judge or of other questions are not continued.
        stamp: In every row: ``model``; for a judge also ``asked``, the questions and their form, and
            ``weights``, fingerprints of model and adapter, None where they are not here.
        load_engine: Is called only if an item is left to score.
        batch_size: Pairs that the engine gets at once, or more.

    Returns:
        The number of items left without a row.
    """
    items = benchmark.items()
    if not items:
        raise UserError("the benchmark has no items")
    num_failed = 0
    with Journal(file) as results:
        done = _keys(results, items, stamp)
        print(f"{len(items)} items, {len(done)} already in {file}", flush=True)
        todo = [item for item in items if _key(item.fields) not in done]
        if not todo:
            return 0
        engine = load_engine()
        with tqdm(total=len(items), initial=len(done), unit="item", mininterval=1.0) as progress:
            for item, answer in score_items(benchmark, todo, engine, batch_size):
                if isinstance(answer, str):
                    num_failed += 1
                    name = " ".join(str(field) for field in item.fields.values())
                    tqdm.write(f"item {name}: {answer}", file=sys.stderr)
                else:
                    results.append(stamp | item.fields | answer)
                    progress.update()
    if num_failed:
        print(
            f"{num_failed} items have no result; run the same command to retry them",
            file=sys.stderr,
        )
    return num_failed


def _key(fields: Row) -> str:
    return json.dumps(fields, sort_keys=True)


def _keys(results: Journal, items: Sequence[Item], stamp: Row) -> set[str]:
    """The keys of the items that have a row. Raises UserError: A row is of something else."""
    known = {_key(item.fields) for item in items}
    keys = set()
    for row in results.rows:
        key = _key({name: row.get(name) for name in items[0].fields})
        others = [name for name in stamp if not _agree(row.get(name), stamp[name])]
        if key not in known:
            others.append(f"item {key}")
        if others:
            raise UserError(
                f"{results.path} has results of something else ({', '.join(others)}); move the file "
                "away, or pass another --results_dir"
            )
        keys.add(key)
    return keys


def _agree(first: Any, second: Any) -> bool:
    """Whether two stamps are equal; weights that were not here yet may be any."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return all(None in pair or pair[0] == pair[1] for pair in zip(first, second, strict=True))
    return first == second


def score_items(
    benchmark: Benchmark, items: Sequence[Item], engine: ScorePairs, batch_size: int
) -> Iterator[tuple[Item, Row | str]]:
    """Every item with its row, or with the reason why it has none.

    The engine gets ``batch_size`` pairs or more at once. If it fails on a batch, each of the items
    is tried alone.
    """
    batch: list[tuple[Item, list[Pair]]] = []
    num_pairs = 0
    for position, item in enumerate(items, start=1):
        try:
            pairs = benchmark.pairs(item)
            batch.append((item, pairs))
            num_pairs += len(pairs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield item, _first_line(error)
        if num_pairs >= batch_size or position == len(items):
            yield from _score(benchmark, batch, engine)
            batch = []
            num_pairs = 0


def _score(
    benchmark: Benchmark, batch: Sequence[tuple[Item, list[Pair]]], engine: ScorePairs
) -> Iterator[tuple[Item, Row | str]]:
    all_pairs = []
    for _, pairs in batch:
        all_pairs += pairs
    try:
        verdicts = engine(all_pairs) if all_pairs else []
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may refuse one image in any way
        if len(batch) == 1:
            yield batch[0][0], f"the engine failed: {_first_line(error)}"
        else:
            for one in batch:
                yield from _score(benchmark, [one], engine)
        return
    start = 0
    for item, pairs in batch:
        yield item, _row(benchmark, item, verdicts[start : start + len(pairs)])
        start += len(pairs)


def _row(benchmark: Benchmark, item: Item, verdicts: Sequence[Verdict]) -> Row | str:
    scores = []
    for verdict in verdicts:
        if not verdict.ok:
            return verdict.error
        scores.append(verdict.p_yes)
    return benchmark.result(item, scores)


def _first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def read_results(results_dir: Path, columns: Callable[[Row], Row]) -> pd.DataFrame:
    """The rows of a folder's results files.

    Args:
        results_dir: With ``*.jsonl``.
        columns: The columns of the table, from a row. ``model``, the file's name, is added.
    """
    rows = []
    for file in sorted(results_dir.glob("*.jsonl")):
        for row in read_json_lines(file):
            rows.append({"model": file.stem} | columns(row))
    if not rows:
        raise UserError(
            f"no results (*.jsonl) in {results_dir}: run the benchmark, which says why items have none"
        )
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


class EditRows:
    """The rows of a data set, and their images: one before the edit, and two edits of it.

    Images stay undecoded until they are asked for, so that a broken one affects only its row.

    Args:
        dataset: Hub name, folder of ``save_to_disk`` or of parquet files, or a .jsonl file, to
            which image paths are relative. Default: the folder named as the data set in ., .. or
            ../.., else the hub's ``hub_name``.
        hub_name: ``OWNER/NAME``.
        texts: Columns that are needed.
        before: Column of the image before the edit.
        after: Column of the two edits.

    Raises:
        UserError: The data set is missing, not readable, or lacks a column.
    """

    def __init__(
        self, dataset: str | None, hub_name: str, texts: Sequence[str], before: str, after: str
    ) -> None:
        self.rows: list[Row]
        self._before = before
        self._after = after
        self._stored: Callable[[int], Row]
        path = Path(dataset or _local_copy(hub_name) or hub_name).expanduser()
        self._root = path.parent if path.is_file() else path
        if path.suffix == ".jsonl":
            self.rows = read_json_lines(path)
            self._stored = self.rows.__getitem__
            columns = set().union(*self.rows)
        else:
            loaded = _load(path, hub_name)
            columns = set(loaded.column_names)
            undecoded = loaded.with_format("arrow")
            available = [name for name in texts if name in columns]
            self.rows = undecoded.select_columns(available)[:].to_pylist()
            self._stored = lambda index: undecoded[index].to_pylist()[0]
        missing = [column for column in (*texts, before, after) if column not in columns]
        if missing:
            raise UserError(
                f"dataset {path} lacks the columns {', '.join(missing)}; "
                f"it has {', '.join(sorted(columns))}"
            )

    def images(self, index: int) -> list[Image.Image]:
        """The image before the edit and the two edits, RGB.

        Raises:
            ValueError: One cannot be read; the message names its column.
            KeyError: The row lacks a column.
        """
        row = self._stored(index)
        before = row[self._before]
        edits = row[self._after]
        if not isinstance(edits, list) or len(edits) != 2:
            raise ValueError(f"{self._after} must hold 2 images")
        images = [self._open(before, self._before)]
        for number, edit in enumerate(edits):
            images.append(self._open(edit, f"{self._after}[{number}]"))
        return images

    def _open(self, stored: Any, column: str) -> Image.Image:
        """The image of a cell: a path relative to the data set, bytes, or a dict with either."""
        if isinstance(stored, dict):
            stored = stored.get("bytes") or stored.get("path")
        if not isinstance(stored, (bytes, str)) or not stored:
            raise ValueError(f"{column} holds no image but {stored!r}")
        is_path = isinstance(stored, str)
        try:
            return read_image(self._root / stored if is_path else stored)
        except UnreadableImage as error:
            place = f"{column} {stored if is_path else ''}"
            raise ValueError(f"image {place} {error}") from error


def _local_copy(hub_name: str) -> Path | None:
    """The folder named as the data set in ., .. or ../... None: there is none.

    The folder of a benchmark's code may have that name; it counts if the data were downloaded to
    it.
    """
    for place in (".", "..", "../.."):
        folder = Path(place) / hub_name.partition("/")[2]
        is_code = (folder / "evaluation.py").is_file() and not (folder / "data").is_dir()
        if folder.is_dir() and not is_code:
            return folder
    return None


def _load(path: Path, hub_name: str) -> Any:
    """A data set of the package ``datasets``: the split train, or without one all splits."""
    import datasets

    try:
        is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
        load = datasets.load_from_disk if is_saved else datasets.load_dataset
        loaded = load(str(path))
    except Exception as error:  # hub, network, cache and format errors share no base class
        local_name = hub_name.partition("/")[2]
        raise UserError(
            f"dataset {path} cannot be read: {str(error).partition(chr(10))[0]}; download it with "
            f"`hf download {hub_name} --repo-type dataset --local-dir {local_name}` "
            "(HF_ENDPOINT: a mirror)"
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    return datasets.concatenate_datasets(list(loaded.values()))
