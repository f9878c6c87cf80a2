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

Results: <results_dir>/<model>.jsonl (with --question: <model>-v<names>.jsonl). At the end the tables of all models in
the folder are printed (again with: python calculate_statistics.py).
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from calculate_statistics import save_tables

from paco_eval.data import Source, open_source
from paco_eval.results import Row
from paco_eval.runner import Item, Prepared, exit_status, new_parser, parse, run_judge
from paco_judge.client import Pair
from paco_judge.questions import EDITING, Question, editing_texts, load_editing_questions
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
TEXT_COLUMNS = ("key", "instruction", "task_type", "dimension")
IMAGE_COLUMNS = ("input_image", "output_images")


def load_bench(
    dataset: str | None, questions: Sequence[Question], split: str | None = None, resize_edits: bool = False
) -> list[Item]:
    """Read all rows but not their images. Raises BenchError, as ``open_source``.

    ``resize_edits``: every edit gets the size of its input image (Pillow's default resampling).
    """
    source = open_source(dataset, HUB_NAME, TEXT_COLUMNS, IMAGE_COLUMNS, split)
    fields = ({"key": row.get("key"), "dimension": row.get("dimension")} for row in source.rows)
    return [
        Item({"index": index} | own, partial(prepare, source, index, questions, resize_edits))
        for index, own in enumerate(fields)
    ]


def prepare(source: Source, index: int, questions: Sequence[Question], resize_edits: bool) -> Prepared:
    """A row's pairs (all questions on the better edit, then on the worse), and the function that makes its result."""
    row = source.rows[index]
    task, asked = str(row["task_type"]), editing_texts(questions, row["instruction"], row["dimension"])
    before, *edits = source.pictures(index)
    if resize_edits:
        edits = [edit.resize(before.size) for edit in edits]
    pairs = [Pair(before, edit, question) for edit in edits for question in asked.values()]

    def to_row(values: list[float]) -> Row:
        answers = [dict(zip(asked, values[: len(asked)])), dict(zip(asked, values[len(asked) :]))]
        scores = [editing_score(*map(Verdict, answer.values())) for answer in answers]
        return {"task_type": task, "answers": answers, "scores": scores}

    return pairs, to_row


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = new_parser(__doc__)
    text = f"hub name, folder or file; default: EditReward-Bench in ., .. or ../.., else {HUB_NAME}"
    parser.add_argument("--dataset", "--dataset_dir", "--benchmark_dir", help=text)
    parser.add_argument("--split", help="split of the data set; default: train, or the only one")
    text = "shipped templates or text files: whether the rest is kept, and whether the instruction is followed; one "
    text += "alone decides every dimension; default: " + " ".join(EDITING)
    parser.add_argument("--question", nargs="+", metavar="NAME|FILE", help=text)
    parser.add_argument("--resize_edits", action="store_true", help="show edits at the size of their input image")
    parser.add_argument("--output", default="results_summary", help="the tables: <output>.txt and <output>.tex")
    return parse(parser, arguments)


def evaluate(args: argparse.Namespace) -> int:
    """Score the rows without a result and print the tables; returns the number of rows left without."""
    questions = load_editing_questions(args.question or EDITING)
    version = "-v" + "+".join(question.name for question in questions) if args.question else ""
    items = load_bench(args.dataset, questions, args.split, args.resize_edits)
    failed = run_judge(args, items, questions, version, resize_edits=args.resize_edits)
    if failed < len(items):
        save_tables(Path(args.results_dir), args.output)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return exit_status(evaluate, command_line(arguments))


if __name__ == "__main__":
    sys.exit(main())
