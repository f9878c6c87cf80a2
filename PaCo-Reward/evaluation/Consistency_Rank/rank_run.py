"""One run over ConsistencyRank-Bench, whatever gives the scores: what eval_vllm.py and eval.py share."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rank_data import Bench, RankItem, find_bench, item_pairs, load_bench
from rank_metrics import predicted_order, rank_metrics

from paco_eval.engines import Engine, make_engine, model_names
from paco_eval.results import ResultsFile
from paco_eval.running import score_missing
from paco_eval.scoring import Prepared
from paco_judge.verdict import mean_over_dimensions

DEFAULT_TEMPLATE = 3


def run(args: argparse.Namespace, exact: str, short: str, engine_of: Callable[[], tuple[str, Engine]]) -> int:
    """Score what is not yet in `<results_dir>/<short>.jsonl`; returns the number of items without a result.

    Args:
        args: with dataset_dir, prompt_template, results_dir and batch_size.
        exact: what gives the scores, written into every row; a file of another one is refused.
        engine_of: makes the engine, once it is known that something is left to do, and says its name.

    Raises:
        BenchError: the run cannot go on.
    """
    bench = load_bench(find_bench(args.dataset_dir), with_criteria=args.prompt_template == 1)
    file = Path(args.results_dir) / f"{short}.jsonl"
    with ResultsFile(file, exact, {item.key for item in bench.items}, row_key) as results:
        print(f"{len(bench.items)} items, {len(results.done)} already in {file}", flush=True)
        for folder, reason in bench.broken:
            print(f"item {folder}: {reason}", file=sys.stderr)
        unscored = score_missing(
            bench.items,
            results,
            lambda item: item.key,
            lambda item: prepare(bench, item, args.prompt_template),
            engine_of,
            args.batch_size,
        )
    failed = [*(folder for folder, _ in bench.broken), *(item.folder for item in unscored)]
    if failed:
        names = ", ".join(failed[:10]) + (" …" if len(failed) > 10 else "")
        print(f"{len(failed)} items have no result: {names}; run again to retry them", file=sys.stderr)
    return len(failed)


def run_judge(args: argparse.Namespace) -> int:
    """`run` with a judge that is asked a question: `args` as of `add_engine_arguments`, with model."""
    exact, short = model_names(args.model, args.adapter)
    return run(args, exact, f"{short}-v{args.prompt_template}", lambda: make_engine(args))


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """What both command lines say about the benchmark and the question."""
    parser.add_argument("--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../..")
    parser.add_argument(
        "--prompt_template",
        type=int,
        choices=(1, 2, 3),
        help=f"1 each criterion, 2 Yes or No only, 3 Yes or No, then reasons; default: {DEFAULT_TEMPLATE}",
    )


def row_key(row: dict) -> tuple[int, str, str]:
    """The key of the item that a row of the results is about."""
    return row["index"], row["folder"], row["ref_image"]


def prepare(bench: Bench, item: RankItem, template: int) -> Prepared:
    """An item's pairs, and what makes its row from their scores. Raises ItemError."""
    pairs, dimensions = item_pairs(bench, item, template)
    return pairs, lambda values: result_row(item, values, dimensions)


def result_row(item: RankItem, values: list[float], dimensions: list[list[str]]) -> dict:
    """What is written about an item; `values`: scores of its pairs, candidate after candidate."""
    remaining = iter(values)
    scores = []
    for named in dimensions:
        by_dimension: dict[str, list[float]] = {}
        for dimension in named:
            by_dimension.setdefault(dimension, []).append(next(remaining))
        scores.append(mean_over_dimensions(by_dimension))
    return {
        "index": item.index,
        "folder": item.folder,
        "ref_image": item.ref_image,
        "comp_images": list(item.comp_images),
        "rank_images": [item.comp_images[i] for i in item.true_order],
        "scores": scores,
        "predicted_images": [item.comp_images[i] for i in predicted_order(scores)],
        "metrics": rank_metrics(scores, item.true_order),
    }
