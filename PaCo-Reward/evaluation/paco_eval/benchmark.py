"""What a benchmark is, and one loop for all: items become pairs, scores, rows of a results file."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from paco_eval.engines import ScorePairs, ask_once, make_engine
from paco_eval.results import (
    BenchError,
    ResultsFile,
    Row,
    fingerprint,
    first_line,
    key_of,
    problem_of,
)
from paco_judge.client import JudgeError
from paco_judge.questions import Pair, Question, form_of, record
from paco_judge.verdict import Verdict

GIVE_UP_AFTER = 16  # items in a row on which the engine fails: then it is the engine, not the items


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


@dataclass(frozen=True)
class Outcome:
    """An item with its row, or with the reason why it has none."""

    item: Item
    row: Row | None
    error: str | None = None


def run_judge(
    args: argparse.Namespace,
    benchmark: Benchmark,
    questions: Sequence[Question],
    suffix: str,
    **asked: Any,
) -> int:
    """``run`` with the judge of the options of ``parse``.

    Args:
        args: The command line.
        benchmark: What is scored.
        questions: Are recorded in each row, with ``asked``.
        suffix: Stands after the judge's name in the name of the results file.
    """
    places = [place for place in (args.model, args.adapter) if place]
    short_names = [Path(os.path.abspath(place)).name for place in places]
    # Checkpoints may share a folder name, so rows hold the whole path.
    exact_names = [_exact_name(place) for place in places]
    stamp = {
        "model": " + ".join(exact_names),
        "asked": record(questions, form_of(args)) | asked,
        "weights": None if args.server else fingerprint(*places),
    }
    file = Path(args.results_dir) / f"{'+'.join(short_names)}{suffix}.jsonl"
    return run(benchmark, file, stamp, partial(_judge_engine, args), args.batch_size)


def _exact_name(place: str) -> str:
    return str(Path(place).resolve()) if Path(place).is_dir() else place


def _judge_engine(args: argparse.Namespace) -> ScorePairs:
    return ask_once(make_engine(args))  # EditReward-Bench repeats edits


def run(
    benchmark: Benchmark,
    file: Path,
    stamp: Row,
    load_engine: Callable[[], ScorePairs],
    batch_size: int,
) -> int:
    """Append a row to ``file`` for every item that has none.

    Args:
        benchmark: What is scored.
        file: The results; see ``ResultsFile``, also for ``stamp``.
        stamp: In every row.
        load_engine: Is called only if an item is left to score.
        batch_size: Pairs that the engine gets at once, or more.

    Returns:
        The number of items left without a row.
    """
    items = benchmark.items()
    if not items:
        raise BenchError("the benchmark has no items")
    num_failed = 0
    with ResultsFile(file, [item.fields for item in items], stamp) as results:
        num_done = len(results.done)
        print(f"{len(items)} items, {num_done} already in {file}", flush=True)
        todo = [item for item in items if key_of(item.fields) not in results.done]
        if not todo:
            return 0
        engine = load_engine()
        with tqdm(total=len(items), initial=num_done, unit="item", mininterval=1.0) as progress:
            for outcome in score_items(benchmark, todo, engine, batch_size):
                if outcome.error is None:
                    results.append(outcome.item.fields | outcome.row)
                    progress.update()
                else:
                    num_failed += 1
                    name = " ".join(str(field) for field in outcome.item.fields.values())
                    tqdm.write(f"item {name}: {outcome.error}", file=sys.stderr)
    if num_failed:
        print(
            f"{num_failed} items have no result; run the same command to retry them",
            file=sys.stderr,
        )
    return num_failed


def score_items(
    benchmark: Benchmark, items: Sequence[Item], engine: ScorePairs, batch_size: int
) -> Iterator[Outcome]:
    """Every item with its row, or with the reason why it has none.

    The engine gets ``batch_size`` pairs or more at once. If it fails on a batch, each of the items
    is tried alone.
    """
    batch: list[tuple[Item, list[Pair]]] = []
    num_failures = 0
    for position, item in enumerate(items, start=1):
        try:
            batch.append((item, benchmark.pairs(item)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield Outcome(item, None, problem_of(error))
        num_pairs = sum(len(pairs) for _, pairs in batch)
        if num_pairs < batch_size and position < len(items):
            continue
        answers = _score([pairs for _, pairs in batch], engine)
        for (asked_item, _), answer in zip(batch, answers, strict=True):
            if isinstance(answer, str):
                num_failures += 1
                yield Outcome(asked_item, None, answer)
            else:
                num_failures = 0
                yield _outcome(benchmark, asked_item, answer)
            if num_failures >= GIVE_UP_AFTER:
                raise BenchError(f"no score for {num_failures} items in a row: {answer}")
        batch = []


def _outcome(benchmark: Benchmark, item: Item, verdicts: Sequence[Verdict]) -> Outcome:
    for verdict in verdicts:
        if not verdict.ok:
            return Outcome(item, None, verdict.error)
    return Outcome(item, benchmark.result(item, [verdict.p_yes for verdict in verdicts]))


def _score(batch: Sequence[list[Pair]], engine: ScorePairs) -> list[list[Verdict] | str]:
    """The verdicts of each item's pairs, or how the engine failed on them."""
    all_pairs = [pair for pairs in batch for pair in pairs]
    try:
        verdicts = engine(all_pairs) if all_pairs else []
    except (BenchError, JudgeError):
        raise
    except Exception as error:  # noqa: BLE001 - a model may refuse one image in any way
        if len(batch) == 1:
            return [f"the engine failed: {type(error).__name__}: {first_line(error)}"]
        return [answer for pairs in batch for answer in _score([pairs], engine)]
    answers: list[list[Verdict] | str] = []
    start = 0
    for pairs in batch:
        answers.append(verdicts[start : start + len(pairs)])
        start += len(pairs)
    return answers
