"""One benchmark run: items become pairs, pairs become scores, scores become rows of a results file."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from paco_eval.engines import ScorePairs
from paco_eval.results import BenchError, ItemError, ResultsFile, Row, first_line, key_of
from paco_judge.client import Pair
from paco_judge.images import UnreadableImage, read_image
from paco_judge.questions import Question, load_question
from paco_judge.verdict import Verdict

# The pairs of an item, and the function that makes its row from their scores (in the same order).
Prepared = tuple[list[Pair], Callable[[list[float]], Row]]
GIVE_UP_AFTER = 16  # items in a row on which the engine fails: then it is the engine, not the items


@dataclass(frozen=True)
class Item:
    """``fields`` identify it in a results file, ``name`` in messages. ``prepare`` raises ItemError."""

    fields: Row
    name: str
    prepare: Callable[[], Prepared]


def broken(reason: object) -> Prepared:
    """The ``prepare`` of an item that cannot be read."""
    raise ItemError(f"broken row: {reason}")


def run_benchmark(
    items: Sequence[Item], file: Path, stamp: Row, make_engine: Callable[[], tuple[str, ScorePairs]], batch_size: int
) -> int:
    """Append a row to ``file`` for every item that has none; returns the number of items left without a row.

    Args:
        items: The benchmark.
        file: Results file; one of another model, question or benchmark is refused.
        stamp: As in ``ResultsFile``.
        make_engine: Returns the engine's name and the engine; called only if an item is left to score.
        batch_size: Pairs given to the engine at once.

    Raises:
        BenchError: The run cannot continue, or the benchmark has no items.
    """
    if not items:
        raise BenchError("the benchmark has no items")
    failed = []
    with ResultsFile(file, [item.fields for item in items], stamp) as results:
        print(f"{len(items)} items, {len(results.done)} already in {file}", flush=True)
        if todo := [item for item in items if key_of(item.fields) not in results.done]:
            engine_name, engine = make_engine()
            pace = {} if sys.stderr.isatty() else {"mininterval": 10.0}  # seconds between lines of a log
            with tqdm(total=len(items), initial=len(results.done), unit="item", **pace) as progress:
                for item, row in score_items(todo, engine, batch_size):
                    if isinstance(row, ItemError):
                        failed.append(item.name)
                        tqdm.write(f"{item.name}: {row}", file=sys.stderr)
                    else:
                        results.append({"engine": engine_name, **item.fields, **row})
                        progress.update()
    if failed:
        names = ", ".join(failed[:10]) + (" …" if len(failed) > 10 else "")
        print(f"{len(failed)} items have no result: {names}; run the same command to retry them", file=sys.stderr)
    return len(failed)


def score_items(items: Sequence[Item], engine: ScorePairs, batch_size: int) -> Iterator[tuple[Item, Row | ItemError]]:
    """Every item with its row, or with the reason why it has none.

    Items are collected until they hold ``batch_size`` pairs, which the engine gets at once. If the engine fails on a
    batch, each of its items is tried alone.

    Raises:
        BenchError: From the engine, or when it failed on ``GIVE_UP_AFTER`` items in a row.
    """
    batch: list[tuple[Item, Prepared]] = []
    failures = 0
    for position, item in enumerate(items, start=1):
        try:
            batch.append((item, item.prepare()))
        except ItemError as error:
            yield item, error
        if sum(len(pairs) for _, (pairs, _) in batch) < batch_size and position < len(items):
            continue
        for (one, (_, to_row)), verdicts in zip(batch, _score([pairs for _, (pairs, _) in batch], engine)):
            if isinstance(verdicts, Exception):
                failures += 1
                cause = f"{type(verdicts).__name__}: {first_line(verdicts)}"
                yield one, ItemError(f"the engine failed: {cause}")
                if failures >= GIVE_UP_AFTER:
                    raise BenchError(f"the engine failed on {failures} items in a row; last error: {cause}")
                continue
            failures = 0
            missing = next((verdict.error for verdict in verdicts if not verdict.ok), None)
            yield one, ItemError(missing) if missing is not None else to_row([verdict.p_yes for verdict in verdicts])
        batch = []


def _score(batch: list[list[Pair]], engine: ScorePairs) -> Iterator[list[Verdict] | Exception]:
    """The verdicts of each item's pairs, or the exception that they cause."""
    try:
        verdicts = iter(engine([pair for pairs in batch for pair in pairs]) if batch else ())
    except BenchError:
        raise
    except Exception as error:  # noqa: BLE001 - a model or processor may refuse one image in any way
        if len(batch) == 1:
            yield error
            return
        for pairs in batch:
            yield from _score([pairs], engine)
        return
    for pairs in batch:
        yield [next(verdicts) for _ in pairs]


def exit_status(run: Callable[[], int]) -> int:
    """The exit status of a command whose ``run`` returns the number of items without a result.

    0: every item has a result. 1: some have none. 2: the run could not continue. 130: stopped by Ctrl-C.
    """
    try:
        return 1 if run() else 0
    except KeyboardInterrupt:
        print("stopped; run the same command to continue", file=sys.stderr)
        return 130
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def print_table(make: Callable[[], str]) -> int:
    """Print the text of a table; the exit status of the command."""
    try:
        print(make(), end="")
    except (OSError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def question_of(args: argparse.Namespace, about: Sequence[str], option: str = "question") -> Question:
    """The template that an option names. Raises BenchError."""
    try:
        return load_question(getattr(args, option), about)
    except ValueError as error:
        raise BenchError(f"--{option}: {error}") from error


def open_image(stored: Any, root: Path, column: str) -> Image.Image:
    """An RGB image of a data set's cell: a path relative to ``root``, encoded bytes, or a dict with either.

    Raises:
        ItemError: There is none, or it cannot be read; the message names ``column``.
    """
    if isinstance(stored, dict):
        stored = stored.get("bytes") or stored.get("path")
    if not isinstance(stored, bytes) and not (isinstance(stored, str) and stored):
        raise ItemError(f"{column} holds no image but {stored!r}")
    try:
        return read_image(stored if isinstance(stored, bytes) else root / stored)
    except UnreadableImage as error:
        name = column if isinstance(stored, bytes) else f"{column} {root / stored}".strip()
        raise ItemError(f"image {name} {error}") from error
