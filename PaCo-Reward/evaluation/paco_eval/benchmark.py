"""What a benchmark is, its command line, one loop for all (items become pairs, scores, rows of a
results file), and what tables are made from.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from tqdm import tqdm

from paco_eval.judges import ScorePairs, make_engine
from paco_judge.arguments import Parser
from paco_judge.client import DEFAULT_MODEL, JudgeClient
from paco_judge.errors import UserError, run_command
from paco_judge.files import Journal, hash_value, read_json_lines
from paco_judge.identity import UNRECORDED, Match, identity, match
from paco_judge.questions import Pair, Question, add_form_arguments, form_of, record
from paco_judge.weights import TRAINED_MAX_PIXELS, allowed_pixels, local_folder

Row = dict[str, Any]
WEIGHT_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")

EPILOG = """\
The same command continues a run that was stopped. An item that cannot be scored is reported and
left out. Exit status: 0 all items have a result, 1 some have none or the run could not go on, 130
stopped by Ctrl-C."""


@dataclass(frozen=True)
class Item:
    """One row of a benchmark."""

    fields: Row  # identify it in a results file
    row: Row  # what the benchmark's files say about it


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


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """The parser of a command with this ``--help``."""
    return Parser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """A benchmark's command line, with the options of its judge."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--model",
        "--backbone",
        help="folder, hub name, or served name with --server; default: the published "
        "PaCo-Reward-7B, or the server's only model",
    )
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
    parser.add_argument(
        "--continue_unknown",
        action="store_true",
        help="also continue results of which it is unknown whether they are of the same weights, "
        "such as those of a server that does not say which it has",
    )
    add_form_arguments(parser)
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_judge").setLevel(logging.INFO)  # what an adapter changes
    if args.adapter and (args.server or args.engine != "transformers"):
        parser.error("--adapter needs --engine transformers; or export the merged model first")
    if args.model is None and not args.server:
        args.model = f"X-GenGroup/{DEFAULT_MODEL}"
    return args


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

    Raises UserError: The judge is not there.
    """
    if args.server:
        client = JudgeClient(args.server, args.model)
        args.model = client.check()
        weights = client.identity()
        places = [args.model]
    else:
        places = [place for place in (args.model, args.adapter) if place]
        for place in places:
            local_folder(place, WEIGHT_FILES)
        weights = identity(*places)
        if (max_pixels := allowed_pixels()) != TRAINED_MAX_PIXELS:
            asked["max_pixels"] = max_pixels
    exact_names = []
    for place in places:
        # Checkpoints may share a folder name, so rows hold the whole path.
        exact_names.append(str(Path(place).resolve()) if Path(place).is_dir() else place)
    stamp = {
        "model": " + ".join(exact_names),
        "asked": record(questions, form_of(args)) | asked,
        "weights": weights,
    }
    file = results_file(args, suffix)
    load_engine = partial(make_engine, args)
    return score_benchmark(
        benchmark, file, stamp, load_engine, args.batch_size, args.continue_unknown
    )


def results_file(args: argparse.Namespace, suffix: str) -> Path:
    """Where ``run_judge`` has written its results."""
    names = []
    for place in (args.model, args.adapter):
        if place:
            names.append(Path(os.path.abspath(place)).name)
    return Path(args.results_dir) / f"{'+'.join(names)}{suffix}.jsonl"


def score_benchmark(
    benchmark: Benchmark,
    file: Path,
    stamp: Row,
    load_engine: Callable[[], ScorePairs],
    batch_size: int,
    continue_unknown: bool = False,
) -> int:
    """Append a row to ``file`` for every item that has none.

    Args:
        benchmark: What is scored.
        file: The results. Results of another judge, other questions or other items are not continued.
        stamp: In every row, beside a hash of all ``items``: ``model``, for people; ``weights``, an
            identity (``paco_judge.identity``); for a judge also ``asked``, the questions and their
            form.
        load_engine: Is called only if an item is left to score.
        batch_size: Pairs that the engine gets at once, or more.
        continue_unknown: Also continue results of which it is not known whether they are of the
            same weights.

    Returns:
        The number of items left without a row.
    """
    items = benchmark.items()
    if not items:
        raise UserError("the benchmark has no items")
    stamp = stamp | {"items": hash_value([item.row for item in items])}
    num_failed = 0
    with Journal(file) as results:
        done = _keys(results, items, stamp, continue_unknown)
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


def _keys(results: Journal, items: Sequence[Item], stamp: Row, continue_unknown: bool) -> set[str]:
    """The keys of the items that have a row. Raises UserError: A row is of something else."""
    # Weights identify a judge, and neither its path nor its served name.
    compared = stamp.keys() - ({"model", "weights"} if "weights" in stamp else set())
    keys = set()
    for row in results.rows:
        key = _key({name: row.get(name) for name in items[0].fields})
        others = [name for name in compared if row.get(name) != stamp[name]]
        of_row = Match.SAME
        if "weights" in stamp:
            of_row = match(row.get("weights", UNRECORDED), stamp["weights"])
        if of_row is Match.DIFFERENT:
            others.append("weights")
        if others:
            raise UserError(
                f"{results.path} has results of something else ({', '.join(sorted(others))}); move "
                "the file away, or pass another --results_dir"
            )
        if of_row is not Match.SAME and not continue_unknown:
            raise UserError(
                f"{results.path} has results of {row.get('model')}, and whether they are of the "
                f"same weights is unknown ({of_row.value}): pass another --results_dir, or "
                "--continue_unknown to continue them"
            )
        keys.add(key)
    return keys


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
        verdicts = iter(engine(all_pairs) if all_pairs else [])
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may refuse one image in any way
        if len(batch) == 1:
            yield batch[0][0], f"the engine failed: {_first_line(error)}"
        else:
            for one in batch:
                yield from _score(benchmark, [one], engine)
        return
    for item, pairs in batch:
        answers = list(islice(verdicts, len(pairs)))
        errors = [answer.error for answer in answers if not answer.ok]
        if errors:
            yield item, errors[0]
        else:
            yield item, benchmark.result(item, [answer.p_yes for answer in answers])


def _first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def read_results(
    results_dir: Path, columns: Callable[[Row], Row], others: Sequence[Row] = ()
) -> pd.DataFrame:
    """The rows of a folder's results files.

    Args:
        results_dir: With ``*.jsonl``.
        columns: The columns of the table, from a row. ``model``, the file's name, is added.
        others: Further rows of the table.

    Raises:
        UserError: There are none, or a file holds something else.
    """
    rows = []
    for file in sorted(results_dir.glob("*.jsonl")):
        rows += rows_of(file, file.stem, columns)
    rows += others
    if not rows:
        raise UserError(
            f"no results (*.jsonl) in {results_dir}: run the benchmark, which says why items have none"
        )
    return pd.DataFrame(rows)


def rows_of(file: Path, model: str, columns: Callable[[Row], Row]) -> list[Row]:
    """The rows of one results file, see ``read_results``. Raises UserError."""
    rows = []
    for number, row in enumerate(read_json_lines(file), start=1):
        try:
            rows.append({"model": model} | columns(row))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{file} row {number} is no result of this benchmark ({_first_line(error)}); move "
                "the file away, or pass another folder of results"
            ) from error
    return rows


def as_text(table: pd.DataFrame) -> str:
    """Aligned columns; numbers with four digits, ``-`` for none."""
    return table.to_string(index=False, na_rep="-", float_format="{:.4f}".format) + "\n"


def as_latex(table: pd.DataFrame) -> str:
    """A booktabs tabular."""
    text = table.to_latex(index=False, na_rep="-", float_format="%.4f", escape=True)
    return text.replace("±", r"$\pm$")
