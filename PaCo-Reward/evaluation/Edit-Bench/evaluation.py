"""EditReward-Bench: does the judge give the better of two edits the higher score?

  bash evaluate_vllm_PaCoReward.sh                                  PaCo-Reward-7B, vLLM in this process
  bash evaluate_vllm_PaCoReward.sh --model ../../saves/judge        your own judge
  bash evaluate_vllm_PaCoReward.sh --server http://127.0.0.1:8000   a running server (bash vllm_server/launch.sh)
  bash evaluate_vllm_PaCoReward.sh --engine transformers            without vLLM

For each row the judge sees the input image with each of the two edits. Dimension prompt_following asks whether the
edit follows the instruction, consistency whether everything else stayed the same, overall asks both and takes
sqrt(prompt_following * consistency). Scores are P(Yes).

The data set is the hub's EditScore/EditReward-Bench, or with --dataset a folder of parquet files (as `hf download`
stores it) or of save_to_disk, or a .jsonl file whose image paths are relative to it. Columns: key [2], instruction,
input_image, output_images [2, the better first], task_type, dimension.

Results: <results_dir>/<model>.jsonl (with --question: <model>-v<names>.jsonl). At the end the tables of all models in
the folder are printed (again with calculate_statistics.py).
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from calculate_statistics import save_tables

from paco_eval.data import Pictures, open_source
from paco_eval.results import Row
from paco_eval.runner import Item, Prepared, exit_status, new_parser, parse, run_judge
from paco_judge.client import Pair
from paco_judge.questions import EDITING, Question, editing_texts, load_editing_questions
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
COLUMNS = ("key", "instruction", "task_type", "dimension"), ("input_image", "output_images")


def load_bench(
    dataset: str | None, questions: Sequence[Question], resize_edits: bool = False
) -> list[Item]:
    """Read all rows but not their images (see ``open_source``).

    ``resize_edits``: every edit gets the size of its input image (Pillow's default resampling).
    """
    items = []
    for index, (row, pictures) in enumerate(open_source(dataset, HUB_NAME, *COLUMNS)):
        fields = {"index": index, "key": row.get("key"), "dimension": row.get("dimension")}
        items.append(Item(fields, partial(prepare, row, pictures, questions, resize_edits)))
    return items


def prepare(
    row: Row, pictures: Pictures, questions: Sequence[Question], resize_edits: bool
) -> Prepared:
    """A row's pairs (all questions on the better edit, then on the worse), and the function that makes its result."""
    task, asked = (
        str(row["task_type"]),
        editing_texts(questions, row["instruction"], row["dimension"]),
    )
    before, *edits = pictures()
    if resize_edits:
        edits = [edit.resize(before.size) for edit in edits]
    pairs = [Pair(before, edit, question) for edit in edits for question in asked.values()]

    def to_row(values: list[float]) -> Row:
        answers = [dict(zip(asked, values[: len(asked)])), dict(zip(asked, values[len(asked) :]))]
        scores = [editing_score(*map(Verdict, answer.values())) for answer in answers]
        return {"task_type": task, "answers": answers, "scores": scores}

    return pairs, to_row


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    text = f"hub name, folder or file; default: EditReward-Bench in ., .. or ../.., else {HUB_NAME}"
    parser.add_argument("--dataset", "--dataset_dir", "--benchmark_dir", help=text)
    text = "shipped templates or text files: is the rest kept, is the instruction followed; one alone decides every "
    text += "dimension; default: " + " ".join(EDITING)
    parser.add_argument("--question", nargs="+", metavar="NAME|FILE", help=text)
    parser.add_argument(
        "--resize_edits", action="store_true", help="show edits at the size of their input image"
    )
    parser.add_argument(
        "--output", default="results_summary", help="the tables: <output>.txt and <output>.tex"
    )
    return parse(parser, arguments)


def evaluate(args: argparse.Namespace) -> int:
    """Score and print the tables; returns the number of rows without a result."""
    questions = load_editing_questions(args.question or EDITING)
    version = "-v" + "+".join(question.name for question in questions) if args.question else ""
    items = load_bench(args.dataset, questions, args.resize_edits)
    failed = run_judge(args, items, questions, version, resize_edits=args.resize_edits)
    if failed < len(items):
        save_tables(Path(args.results_dir), args.output)
    return failed


def main(arguments: list[str] | None = None) -> int:
    return exit_status(evaluate, command_line(arguments))


if __name__ == "__main__":
    sys.exit(main())
