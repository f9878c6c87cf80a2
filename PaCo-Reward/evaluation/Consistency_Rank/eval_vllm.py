"""ConsistencyRank: rank candidates by the judge's P(Yes) against the reference.

python eval_vllm.py --model X --tensor_parallel_size 1 --gpu_memory_utilization 0.85 --batch_size 8
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from engines import Engine, choose_engine, server_engine, transformers_engine, vllm_engine
from rank_data import Bench, BenchError, ItemError, RankItem, find_bench, item_pairs, load_bench, open_results
from rank_metrics import predicted_order, rank_metrics

from paco_judge.verdict import Verdict, mean_over_dimensions


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder, hub name, or served name with --server")
    parser.add_argument("--adapter", help="adapter folder (engine transformers)")
    parser.add_argument("--dataset_dir", help="folder that holds ConsistencyRank-Bench; default: ., .. or ../..")
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.85)
    parser.add_argument("--batch_size", type=int, default=8, help="pairs given to the engine at once")
    parser.add_argument("--prompt_template", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="default: vllm")
    parser.add_argument("--server", metavar="URL", help="ask a running server instead")
    parser.add_argument("--results_dir", default="results")
    return parser.parse_args(arguments)


def make_engine(args: argparse.Namespace) -> tuple[str, Engine]:
    """The engine that the command line asks for, and its name."""
    name = choose_engine(args.engine, args.server)
    if args.adapter and name != "transformers":
        raise BenchError(f"--adapter needs --engine transformers, not {name}; or export the merged model first")
    if name == "server":
        return name, server_engine(args.server, args.model)
    if name == "transformers":
        return name, transformers_engine(args.model, args.adapter, args.batch_size)
    return name, vllm_engine(args.model, args.tensor_parallel_size, args.gpu_memory_utilization)


def run(args: argparse.Namespace) -> int:
    """Score what is not yet in the results file; returns the number of items without result."""
    bench = load_bench(find_bench(args.dataset_dir), with_criteria=args.prompt_template == 1)
    # Two checkpoints may share a folder name: the file says whose results it holds.
    identity = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    identity += f" + {Path(args.adapter).resolve()}" if args.adapter else ""
    name = Path(args.model).name + (f"+{Path(args.adapter).name}" if args.adapter else "")
    file = Path(args.results_dir) / f"{name}-v{args.prompt_template}.jsonl"
    done = open_results(file, identity, bench.items)
    todo = [item for item in bench.items if item.key not in done]
    print(f"{len(bench.items)} items, {len(done)} already in {file}", flush=True)
    failed = [*bench.broken]
    for folder, reason in bench.broken:
        print(f"item {folder}: {reason}", file=sys.stderr)
    if todo:
        engine_name, engine = make_engine(args)
        with open(file, "a", encoding="utf-8") as out:
            for row, problem in scored(bench, todo, args.prompt_template, engine, args.batch_size):
                if problem:
                    failed.append(problem)
                    print(f"item {problem[0]}: {problem[1]}", file=sys.stderr, flush=True)
                    continue
                out.write(json.dumps({"model": identity, "engine": engine_name, **row}) + "\n")
                out.flush()
                done.add((row["index"], row["folder"], row["ref_image"]))
                print(f"{len(done)}/{len(bench.items)} {row['folder']}", flush=True)
    if failed:
        names = ", ".join(folder for folder, _ in failed[:10])
        print(f"{len(failed)} items have no result: {names}; run again to retry them", file=sys.stderr)
    return len(failed)


def scored(
    bench: Bench, items: list[RankItem], template: int, engine: Engine, batch_size: int
) -> Iterator[tuple[dict, tuple[str, str] | None]]:
    """Results of the items in order, as (row, None), or ({}, (folder, problem)) for one that is broken.

    Items are gathered until they hold `batch_size` pairs, which the engine gets at once.
    """
    gathered: list[tuple[RankItem, list, list[list[str]]]] = []
    for position, item in enumerate(items):
        try:
            gathered.append((item, *item_pairs(bench, item, template)))
        except ItemError as error:
            yield {}, (item.folder, str(error))
        if sum(len(pairs) for _, pairs, _ in gathered) >= batch_size or position == len(items) - 1:
            verdicts = engine([pair for _, pairs, _ in gathered for pair in pairs]) if gathered else []
            start = 0
            for one, pairs, dimensions in gathered:
                yield _result(one, verdicts[start : start + len(pairs)], dimensions)
                start += len(pairs)
            gathered = []


def _result(
    item: RankItem, verdicts: list[Verdict], dimensions: list[list[str]]
) -> tuple[dict, tuple[str, str] | None]:
    bad = next((verdict.error for verdict in verdicts if not verdict.ok), None)
    if bad:
        return {}, (item.folder, bad)
    values = iter(verdict.p_yes for verdict in verdicts)
    scores = []
    for named in dimensions:
        by_dimension: dict[str, list[float]] = {}
        for dimension in named:
            by_dimension.setdefault(dimension, []).append(next(values))
        scores.append(mean_over_dimensions(by_dimension))
    row = {
        "index": item.index,
        "folder": item.folder,
        "ref_image": item.ref_image,
        "comp_images": list(item.comp_images),
        "rank_images": [item.comp_images[i] for i in item.true_order],
        "scores": scores,
        "predicted_images": [item.comp_images[i] for i in predicted_order(scores)],
        "metrics": rank_metrics(scores, item.true_order),
    }
    return row, None


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 when every item has a result."""
    try:
        return 1 if run(parse(arguments)) else 0
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
