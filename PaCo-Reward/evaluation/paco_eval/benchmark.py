"""What a benchmark is, and one loop for all: items become pairs, scores, rows of a results file."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from paco_eval.engines import ScorePairs, ask_once, make_engine
from paco_eval.results import Row
from paco_judge.errors import UserError, run_command
from paco_judge.files import Journal, fingerprint
from paco_judge.questions import Pair, Question, form_of, record
from paco_judge.verdict import Verdict


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


def exit_status(run: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int:
    """The exit status of a command whose ``run`` returns the number of items without a result."""
    return run_command(lambda: 1 if run(args) else 0, ValueError, OSError)


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
    exact_names = [
        str(Path(place).resolve()) if Path(place).is_dir() else place for place in places
    ]
    stamp = {
        "model": " + ".join(exact_names),
        "asked": record(questions, form_of(args)) | asked,
        "weights": [None if args.server else fingerprint(place) for place in places],
    }
    file = Path(args.results_dir) / f"{'+'.join(short_names)}{suffix}.jsonl"

    def load_engine() -> ScorePairs:
        return ask_once(make_engine(args))  # EditReward-Bench repeats edits

    return run(benchmark, file, stamp, load_engine, args.batch_size)


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
    for position, item in enumerate(items, start=1):
        try:
            batch.append((item, benchmark.pairs(item)))
        except KeyError as error:
            yield item, f"its row lacks {error}"
        except (ValueError, TypeError, AttributeError) as error:
            yield item, _first_line(error)
        num_pairs = sum(len(pairs) for _, pairs in batch)
        if num_pairs < batch_size and position < len(items):
            continue
        answers = _score([pairs for _, pairs in batch], engine)
        for (asked_item, _), answer in zip(batch, answers, strict=True):
            yield asked_item, _row(benchmark, asked_item, answer)
        batch = []


def _row(benchmark: Benchmark, item: Item, answer: Sequence[Verdict] | str) -> Row | str:
    if isinstance(answer, str):
        return answer
    for verdict in answer:
        if not verdict.ok:
            return verdict.error
    return benchmark.result(item, [verdict.p_yes for verdict in answer])


def _score(batch: Sequence[list[Pair]], engine: ScorePairs) -> list[list[Verdict] | str]:
    """The verdicts of each item's pairs, or how the engine failed on them."""
    all_pairs = [pair for pairs in batch for pair in pairs]
    try:
        verdicts = engine(all_pairs) if all_pairs else []
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may refuse one image in any way
        if len(batch) == 1:
            return [f"the engine failed: {type(error).__name__}: {_first_line(error)}"]
        return [answer for pairs in batch for answer in _score([pairs], engine)]
    answers: list[list[Verdict] | str] = []
    start = 0
    for pairs in batch:
        answers.append(verdicts[start : start + len(pairs)])
        start += len(pairs)
    return answers


def _first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
