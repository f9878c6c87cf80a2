"""One benchmark run: items become pairs, pairs become scores, scores become rows of a results file."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paco_eval.engines import ScorePairs, ask_once, make_engine
from paco_eval.results import BenchError, Row, fingerprint, first_line, key_of, open_results
from paco_judge.client import DEFAULT_MODEL, JudgeError, Pair
from paco_judge.questions import Question, add_form_arguments, form_of, record
from paco_judge.verdict import Verdict

HUB_MODEL = f"X-GenGroup/{DEFAULT_MODEL}"
GIVE_UP_AFTER = 16  # items in a row on which the engine fails: then it is the engine, not the items

# The pairs of an item, and the function that makes its row from their scores (in the same order).
Prepared = tuple[list[Pair], Callable[[list[float]], Row]]


@dataclass(frozen=True)
class Item:
    """``fields`` identify it in a results file. ``prepare`` raises ValueError, KeyError or TypeError if it is damaged."""

    fields: Row
    prepare: Callable[[], Prepared]


def run_judge(
    args: argparse.Namespace,
    items: Sequence[Item],
    questions: Sequence[Question],
    version: str,
    **asked: Any,
) -> int:
    """``run_benchmark`` with the judge of the options of ``parse``.

    The file is named by the judge's folder and ``version``. Two checkpoints may share a folder name, so the rows hold
    absolute paths; and ``asked``, next to the questions' record.
    """
    places = [args.model, *filter(None, [args.adapter])]
    short = "+".join(Path(os.path.abspath(place)).name for place in places)
    exact = " + ".join(
        str(Path(place).resolve()) if Path(place).is_dir() else place for place in places
    )
    stamp = {"model": exact, "asked": record(questions, form_of(args)) | asked}
    stamp["weights"] = None if args.server else fingerprint(*places)
    make = lambda: ask_once(make_engine(args))  # EditReward-Bench repeats edits
    return run_benchmark(
        items, Path(args.results_dir) / f"{short}{version}.jsonl", stamp, make, args.batch_size
    )


def run_benchmark(
    items: Sequence[Item], file: Path, stamp: Row, make: Callable[[], ScorePairs], batch_size: int
) -> int:
    """Append a row to ``file`` for every item that has none; returns the number of items left without a row.

    ``stamp``: as of ``open_results``. ``make``: makes the engine; called only if an item is left to score.
    """
    if not items:
        raise BenchError("the benchmark has no items")
    failed = 0
    with open_results(file, [item.fields for item in items], stamp) as (done, append):
        print(f"{len(items)} items, {len(done)} already in {file}", flush=True)
        if todo := [item for item in items if key_of(item.fields) not in done]:
            engine = make()
            with tqdm(
                total=len(items), initial=len(done), unit="item", mininterval=1.0
            ) as progress:
                for item, row in score_items(todo, engine, batch_size):
                    if isinstance(row, str):
                        failed += 1
                        tqdm.write(
                            f"item {' '.join(map(str, item.fields.values()))}: {row}",
                            file=sys.stderr,
                        )
                    else:
                        append(item.fields | row)
                        progress.update()
    if failed:
        print(f"{failed} items have no result; run the same command to retry them", file=sys.stderr)
    return failed


def score_items(
    items: Sequence[Item], engine: ScorePairs, batch_size: int
) -> Iterator[tuple[Item, Row | str]]:
    """Every item with its row, or with the reason why it has none.

    The engine gets ``batch_size`` pairs or more at once. If it fails on a batch, each of the items is tried alone.
    """
    batch: list[tuple[Item, Prepared]] = []
    failures = 0
    for position, item in enumerate(items, start=1):
        try:
            batch.append((item, item.prepare()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            yield (
                item,
                f"its row lacks {error}" if isinstance(error, KeyError) else first_line(error),
            )
        if sum(len(pairs) for _, (pairs, _) in batch) < batch_size and position < len(items):
            continue
        found = _score([pairs for _, (pairs, _) in batch], engine)
        for (one, (_, to_row)), verdicts in zip(batch, found, strict=True):
            failures = failures + 1 if isinstance(verdicts, str) else 0
            missing = (
                verdicts
                if failures
                else next((verdict.error for verdict in verdicts if not verdict.ok), None)
            )
            yield (
                one,
                missing if missing is not None else to_row([verdict.p_yes for verdict in verdicts]),
            )
            if failures >= GIVE_UP_AFTER:
                raise BenchError(f"no score for {failures} items in a row: {verdicts}")
        batch = []


def _score(batch: list[list[Pair]], engine: ScorePairs) -> list[list[Verdict] | str]:
    """The verdicts of each item's pairs, or why there are none."""
    try:
        verdicts = iter(engine([pair for pairs in batch for pair in pairs]) if batch else ())
        return [[next(verdicts) for _ in pairs] for pairs in batch]
    except (BenchError, JudgeError):
        raise
    except Exception as error:  # noqa: BLE001 - a model or processor may refuse one image in any way
        if len(batch) == 1:
            return [f"the engine failed: {type(error).__name__}: {first_line(error)}"]
        return [verdicts for pairs in batch for verdicts in _score([pairs], engine)]


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """The parser of a command with this ``--help``."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """A benchmark's command line, with the options of its judge."""
    parser.epilog = (
        "The same command continues a run that was stopped. An item that cannot be scored is reported and left out.\n"
        "Exit status: 0 all items have a result, 1 some have none, 2 the run could not continue, 130 stopped by Ctrl-C."
    )
    text = "folder, hub name, or served name with --server; default: the published PaCo-Reward-7B"
    parser.add_argument("--model", "--backbone", help=text)
    parser.add_argument("--adapter", help="adapter folder (engine transformers)")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs (engine vllm)")
    parser.add_argument(
        "--gpu_memory_utilization", type=float, default=0.85, help="share of each GPU (engine vllm)"
    )
    parser.add_argument(
        "--batch_size", type=int, default=8, help="pairs given to the engine at once"
    )
    parser.add_argument(
        "--engine", choices=("vllm", "transformers"), default="vllm", help="default: vllm"
    )
    parser.add_argument("--server", metavar="URL", help="ask a running server instead")
    parser.add_argument(
        "--port",
        dest="server",
        metavar="PORT",
        type="http://127.0.0.1:{}".format,
        help="on this machine",
    )
    parser.add_argument("--results_dir", "--result_dir", default="results")
    add_form_arguments(parser)
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_judge").setLevel(logging.INFO)  # what an adapter changes
    if args.batch_size < 1:
        parser.error(f"--batch_size must be at least 1, not {args.batch_size}")
    args.model = args.model or (DEFAULT_MODEL if args.server else HUB_MODEL)
    return args


def exit_status(run: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> int:
    """The exit status of a command whose ``run`` returns the number of items without a result."""
    try:
        return 1 if run(args) else 0
    except KeyboardInterrupt:
        print("stopped; run the same command to continue", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2
