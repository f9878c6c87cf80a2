"""EditReward-Bench: does the judge give the better of two edits the higher score?

  bash evaluate_vllm_PaCoReward.sh                                  PaCo-Reward-7B, vLLM in this process
  bash evaluate_vllm_PaCoReward.sh --model ../../saves/judge        your own judge
  bash evaluate_vllm_PaCoReward.sh --server http://127.0.0.1:8000   a running server (bash vllm_server/launch.sh)
  bash evaluate_vllm_PaCoReward.sh --engine transformers            without vLLM

For each row the judge sees the input image with each of the two edits. Dimension prompt_following asks whether the
edit follows the instruction, consistency whether everything else stayed the same, overall asks both and takes
sqrt(prompt_following * consistency). Scores are P(Yes).

The data set is the hub's EditScore/EditReward-Bench, or with --dataset a folder written by save_to_disk, a folder of
parquet files (as `hf download` stores it), or a .jsonl file whose image paths are relative to it. Columns: key [2],
instruction, input_image, output_images [2, the better first], task_type, dimension.

Every row is written to <results_dir>/<model>.jsonl (with --question: <model>-v<names>.jsonl) at once; the same command
continues a run that was stopped. A row that cannot be scored is reported and left out. At the end the tables of all
models in the folder are printed (again with: python calculate_statistics.py). Exit status: 0 all rows have a result,
1 some have none, 2 the run could not continue, 130 stopped by Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from calculate_statistics import save_tables
from edit_reward_bench import HUB_NAME, load_bench

from paco_eval.engines import (
    ScorePairs,
    add_engine_arguments,
    ask_once,
    check_engine_arguments,
    make_engine,
    results_of,
)
from paco_eval.results import BenchError
from paco_eval.runner import exit_status, run_benchmark
from paco_judge.questions import EDITING, form_of, load_editing_questions, record


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="evaluate_vllm_PaCoReward.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = f"hub name, folder or file; default: EditReward-Bench in ., .. or ../.., else {HUB_NAME}"
    parser.add_argument("--dataset", "--dataset_dir", "--benchmark_dir", help=text)
    parser.add_argument("--split", help="split of the data set; default: train, or the only one")
    text = "shipped templates or text files: whether the rest is kept, and whether the instruction is followed; one "
    text += "alone decides every dimension; default: " + " ".join(EDITING)
    parser.add_argument("--question", nargs="+", metavar="NAME|FILE", help=text)
    parser.add_argument("--resize_edits", action="store_true", help="show edits at the size of their input image")
    add_engine_arguments(parser)
    parser.add_argument("--output", default="results_summary", help="the tables: <output>.txt and <output>.tex")
    args = parser.parse_args(arguments)
    check_engine_arguments(parser, args)
    return args


def evaluate(args: argparse.Namespace) -> int:
    """Score the rows without a result and print the tables; returns the number of rows left without.

    Raises:
        BenchError: The run cannot continue.
    """

    def make() -> tuple[str, ScorePairs]:
        name, engine = make_engine(args)
        return name, ask_once(engine)  # the same edit occurs in several rows

    try:
        questions = load_editing_questions(args.question or EDITING)
    except ValueError as error:
        raise BenchError(f"--question: {error}") from error
    version = "-v" + "+".join(question.name for question in questions) if args.question else ""
    asked = record(questions, form_of(args)) | {"resize_edits": args.resize_edits}
    items = load_bench(args.dataset, questions, args.split, args.resize_edits)
    file, stamp = results_of(args, version, asked)
    failed = run_benchmark(items, file, stamp, make, args.batch_size)
    if file.exists():
        print(save_tables(Path(args.results_dir), Path(args.output)))
        print(f"tables: {args.output}.txt, {args.output}.tex")
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(arguments)
    return exit_status(lambda: evaluate(args))


if __name__ == "__main__":
    sys.exit(main())
