"""One benchmark run: items become pairs, pairs become scores, scores become rows of a results file."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from paco_eval.engines import ScorePairs
from paco_eval.results import BenchError, ItemError, ResultsFile, Row, first_line
from paco_judge.client import Pair
from paco_judge.images import UnreadableImage, read_image
from paco_judge.verdict import Verdict

# The pairs of an item, and the function that makes its row from their scores (in the same order).
Prepared = tuple[list[Pair], Callable[[list[float]], Row]]
GIVE_UP_AFTER = 16  # items in a row on which the engine fails: then it is the engine, not the items


@dataclass
class Benchmark:
    """What a run needs to know.

    Attributes:
        prepare: Makes the pairs of an item; raises ItemError.
        row_key: The key of the item that a row is about.
        items: Each has a ``key`` (identifies it in a results file) and a ``name`` (for messages).
        broken: (name, reason) of items that could not be read.
        asked: What is asked and in which form (``paco_judge.questions.record``), recorded in every row.
    """

    prepare: Callable[[Any], Prepared]
    row_key: Callable[[Row], tuple]
    items: list[Any] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)
    asked: Row | None = None


def run_benchmark(
    bench: Benchmark,
    file: Path,
    model: str,
    make_engine: Callable[[], tuple[str, ScorePairs]],
    batch_size: int,
    weights: Callable[[], str | None],
) -> int:
    """Append a row to ``file`` for every item that has none; returns the number of items left without a row.

    Args:
        bench: The benchmark.
        file: Results file; one of another model, question or benchmark is refused.
        model: What gives the scores, recorded in every row.
        make_engine: Returns the engine's name and the engine; called only if an item is left to score.
        batch_size: Pairs given to the engine at once.
        weights: As in ``ResultsFile``: results of other weights under the same name are refused.

    Raises:
        BenchError: The run cannot continue, or the benchmark has no items.
    """
    if not bench.items and not bench.broken:
        raise BenchError("the benchmark has no items")
    with ResultsFile(file, model, {item.key for item in bench.items}, bench.row_key, bench.asked, weights) as results:
        print(f"{len(bench.items)} items, {len(results.done)} already in {file}", flush=True)
        for name, reason in bench.broken:
            print(f"{name}: {reason}", file=sys.stderr)
        failed = [name for name, _ in bench.broken]
        todo = [item for item in bench.items if item.key not in results.done]
        if todo:
            engine_name, engine = make_engine()
            pace = {} if sys.stderr.isatty() else {"mininterval": 10.0}  # seconds between lines of a log
            with tqdm(total=len(bench.items), initial=len(results.done), unit="item", **pace) as progress:
                for item, row in score_items(todo, bench.prepare, engine, batch_size):
                    if isinstance(row, ItemError):
                        failed.append(item.name)
                        tqdm.write(f"{item.name}: {row}", file=sys.stderr)
                    else:
                        results.append({"engine": engine_name, **row})
                        progress.update()
    if failed:
        names = ", ".join(failed[:10]) + (" …" if len(failed) > 10 else "")
        print(f"{len(failed)} items have no result: {names}; run the same command to retry them", file=sys.stderr)
    return len(failed)


def score_items(
    items: Sequence[Any], prepare: Callable[[Any], Prepared], engine: ScorePairs, batch_size: int
) -> Iterator[tuple[Any, Row | ItemError]]:
    """Every item with its row, or with the reason why it has none.

    Items are collected until they hold ``batch_size`` pairs, which the engine gets at once. If the engine fails on a
    batch, each of its items is tried alone.

    Raises:
        BenchError: From the engine, or when it failed on ``GIVE_UP_AFTER`` items in a row.
    """
    batch: list[tuple[Any, Prepared]] = []
    failures = 0
    for position, item in enumerate(items):
        try:
            batch.append((item, prepare(item)))
        except ItemError as error:
            yield item, error
        full = sum(len(pairs) for _, (pairs, _) in batch) >= batch_size or position == len(items) - 1
        if not full or not batch:
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
        verdicts = iter(engine([pair for pairs in batch for pair in pairs]))
    except BenchError:
        raise
    except Exception as error:  # noqa: BLE001 - a model or processor may refuse one image in any way
        if len(batch) == 1:
            yield error
        else:
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
