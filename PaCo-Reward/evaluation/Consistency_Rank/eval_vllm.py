"""ConsistencyRank: rank candidates by the judge's P(Yes) against the reference.

python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85 --batch_size 8
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from rank_data import Bench, RankItem, find_bench, item_pairs, load_bench
from rank_metrics import predicted_order, rank_metrics

from paco_eval.engines import add_engine_arguments, make_engine, model_names
from paco_eval.errors import BenchError, ItemError
from paco_eval.results import ResultsFile
from paco_eval.scoring import Prepared, results_of
from paco_judge.verdict import mean_over_dimensions


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder, hub name, or served name with --server")
    parser.add_argument("--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../..")
    parser.add_argument("--prompt_template", type=int, choices=(1, 2, 3), default=3)
    add_engine_arguments(parser)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    """Score what is not yet in the results file; returns the number of items without result."""
    bench = load_bench(find_bench(args.dataset_dir), with_criteria=args.prompt_template == 1)
    exact, short = model_names(args.model, args.adapter)
    file = Path(args.results_dir) / f"{short}-v{args.prompt_template}.jsonl"
    with ResultsFile(file, exact, {item.key for item in bench.items}, row_key) as results:
        print(f"{len(bench.items)} items, {len(results.done)} already in {file}", flush=True)
        failed = [*bench.broken]
        for folder, reason in bench.broken:
            print(f"item {folder}: {reason}", file=sys.stderr)
        failed += score_missing(args, bench, results)
    if failed:
        names = ", ".join(folder for folder, _ in failed[:10])
        print(f"{len(failed)} items have no result: {names}; run again to retry them", file=sys.stderr)
    return len(failed)


def row_key(row: dict) -> tuple[int, str, str]:
    """The key of the item that a row of the results is about."""
    return row["index"], row["folder"], row["ref_image"]


def score_missing(args: argparse.Namespace, bench: Bench, results: ResultsFile) -> list[tuple[str, str]]:
    """Append the results of all items that have none; returns (folder, problem) of those that stay without."""
    todo = [item for item in bench.items if item.key not in results.done]
    if not todo:
        return []
    engine_name, engine = make_engine(args)
    failed = []
    for item, row in results_of(todo, lambda item: prepare(bench, item, args.prompt_template), engine, args.batch_size):
        if isinstance(row, ItemError):
            failed.append((item.folder, str(row)))
            print(f"item {item.folder}: {row}", file=sys.stderr, flush=True)
            continue
        results.append({"engine": engine_name, **row})
        print(f"{len(results.done)}/{len(bench.items)} {item.folder}", flush=True)
    return failed


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


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 when every item has a result."""
    try:
        return 1 if run(parse(arguments)) else 0
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
