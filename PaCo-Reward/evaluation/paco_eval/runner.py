"""One benchmark run: items become pairs, pairs become scores, scores become rows of a results file."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from paco_eval.engines import ScorePairs
from paco_eval.results import BenchError, ItemError, ResultsFile, Row, first_line
from paco_judge import images
from paco_judge.client import Pair
from paco_judge.verdict import Verdict

# The pairs of an item, and the function that makes its row from their scores (in the same order).
Prepared = tuple[list[Pair], Callable[[list[float]], Row]]
GIVE_UP_AFTER = 16  # items in a row on which the engine fails: then it is the engine, not the items
LINE_EVERY_S = 10.0


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
        BenchError: The run cannot continue.
    """
    with ResultsFile(file, model, {item.key for item in bench.items}, bench.row_key, bench.asked, weights) as results:
        print(f"{len(bench.items)} items, {len(results.done)} already in {file}", flush=True)
        for name, reason in bench.broken:
            print(f"{name}: {reason}", file=sys.stderr)
        failed = [name for name, _ in bench.broken]
        todo = [item for item in bench.items if item.key not in results.done]
        if todo:
            engine_name, engine = make_engine()
            with closing(Progress(len(bench.items), len(results.done))) as progress:
                for item, row in score_items(todo, bench.prepare, engine, batch_size):
                    if isinstance(row, ItemError):
                        failed.append(item.name)
                        progress.write(f"{item.name}: {row}")
                    else:
                        results.append({"engine": engine_name, **row})
                    progress.step(scored=not isinstance(row, ItemError))
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


class Progress:
    """A bar on a terminal, else a line every ten seconds and at the end; everything goes to stderr."""

    def __init__(self, total: int, done: int):
        self.total, self.before, self.count = total, done, done
        self._started = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()
        # The size is passed because tqdm shows no bar on a terminal that does not report its own.
        size = shutil.get_terminal_size()
        options = {"ncols": size.columns, "nrows": size.lines, "disable": not self._terminal}
        self._bar = tqdm(total=total, initial=done, unit="item", **options)

    def close(self) -> None:
        """Remove the bar's hold on the terminal."""
        self._bar.close()

    def step(self, scored: bool = True) -> None:
        """One item further; an item without a result is not counted."""
        if scored:
            self.count += 1
            self._bar.update()
        now = time.monotonic()
        if not self._terminal and (now - self._last >= LINE_EVERY_S or self.count == self.total):
            self._last = now
            elapsed = now - self._started
            left = elapsed / max(self.count - self.before, 1) * (self.total - self.count)
            clock = [timedelta(seconds=round(seconds)) for seconds in (elapsed, left)]
            self.write(f"{self.count}/{self.total} items  elapsed {clock[0]}  left {clock[1]}")

    def write(self, text: str) -> None:
        """A line above the bar."""
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


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


def read_image(source: str | Path | bytes, name: str) -> Image.Image:
    """An RGB image from a path or from encoded bytes. Raises ItemError with ``name`` if it cannot be read."""
    try:
        return images.read_image(source)
    except images.UnreadableImage as error:
        raise ItemError(f"image {name} {error}") from error
