"""EditReward-Bench: does the judge give the better of two edits the higher score?

  bash evaluate_vllm_PaCoReward.sh                                  PaCo-Reward-7B, vLLM in this process
  bash evaluate_vllm_PaCoReward.sh --model ../../saves/judge        a judge of your own
  bash evaluate_vllm_PaCoReward.sh --server http://127.0.0.1:8000   a running server (bash vllm_server/launch.sh)
  bash evaluate_vllm_PaCoReward.sh --engine transformers            without vLLM

For each row the judge sees the input image with each of the two edits. Dimension prompt_following asks whether the
edit follows the instruction, consistency whether all else stayed as it was, overall asks both and takes
sqrt(prompt_following * consistency). Scores are P(Yes).

The data set is the hub's EditScore/EditReward-Bench, or with --dataset a folder written by save_to_disk, a folder of
parquet files (as `hf download` leaves it), or a .jsonl file whose image paths are relative to it. Columns: key [2],
instruction, input_image, output_images [2, the better first], task_type, dimension.

Every row is written to <results_dir>/<model>.jsonl at once; the same command continues a run that was stopped. A row
that cannot be scored is named and left out, the others go on. At the end come the tables of all models in the folder
(again with: python calculate_statistics.py). Exit status: 0 all rows have a result, 1 some have none, 2 the run could
not go on, 130 stopped by Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from calculate_statistics import save_tables
from edit_data import load_bench, prepare
from edit_source import HUB_NAME, LOCAL_NAME

from paco_eval.engines import Engine, add_engine_arguments, asking_once, make_engine, model_names
from paco_eval.results import ResultsFile
from paco_eval.running import exit_status, score_missing
from paco_judge.client import DEFAULT_MODEL

HUB_MODEL = f"X-GenGroup/{DEFAULT_MODEL}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="evaluate_vllm_PaCoReward.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        help=f"model folder, hub name, or served name with --server; default: {HUB_MODEL}, of a server {DEFAULT_MODEL}",
    )
    parser.add_argument(
        "--dataset",
        "--dataset_dir",
        help=f"hub name, folder or file; default: {LOCAL_NAME} in ., .. or ../.., else {HUB_NAME}",
    )
    parser.add_argument("--split", help="split of the data set; default: train, or the only one")
    add_engine_arguments(parser)
    parser.add_argument("--output", default="results_summary", help="the tables: <output>.txt and <output>.tex")
    args = parser.parse_args(arguments)
    if args.batch_size < 1:
        parser.error(f"--batch_size must be at least 1, not {args.batch_size}")
    args.model = args.model or (DEFAULT_MODEL if args.server else HUB_MODEL)
    return args


def run(args: argparse.Namespace) -> int:
    """Score what is not yet in the results file and print the tables; returns the number of rows without result.

    Raises:
        BenchError: the run cannot go on.
    """
    bench = load_bench(args.dataset, args.split)
    exact, short = model_names(args.model, args.adapter)
    file = Path(args.results_dir) / f"{short}.jsonl"
    with ResultsFile(file, exact, {row.identity for row in bench.rows}, row_identity) as results:
        print(f"{len(bench.source.rows)} rows, {len(results.done)} already in {file}", flush=True)
        failed = len(bench.broken)
        for name, reason in bench.broken:
            print(f"{name}: {reason}", file=sys.stderr)
        failed += len(
            score_missing(
                bench.rows,
                results,
                lambda row: row.identity,
                lambda row: prepare(bench, row),
                lambda: remembering(make_engine(args)),
                args.batch_size,
            )
        )
        some = bool(results.done)
    if some:
        print(save_tables(Path(args.results_dir), Path(args.output)))
        print(f"tables: {args.output}.txt, {args.output}.tex")
    if failed:
        print(
            f"rows without a result: {failed}, named above, not in the tables; run again to retry them", file=sys.stderr
        )
    return failed


def row_identity(row: dict) -> tuple[int, str, str, str]:
    """The identity of the benchmark's row that a row of the results is about."""
    first, second = row["key"]
    return row["index"], first, second, row["dimension"]


def remembering(named: tuple[str, Engine]) -> tuple[str, Engine]:
    """The same edit stands in several rows: it is asked about once."""
    name, engine = named
    return name, asking_once(engine)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is in the module's text."""
    args = parse(arguments)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
