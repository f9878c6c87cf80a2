"""VCReward-Bench (arXiv 2603.28547): does the judge agree with experts on which of two edits is more consistent?

  hf download GEditBench-v2/VCReward-Bench --repo-type dataset --local-dir VCReward-Bench
  python evaluation.py --model ../../models/judge --engine transformers     the judge scores each edit
  python evaluation.py --server http://127.0.0.1:8000 --compare FILE        one question compares both edits

The judge scores each edit against its source image; the higher score wins. A judge that compares directly is asked with
--compare: the source and both edits are shown, in both orders; Yes means that the first edit is better.

Columns: key, instruction, source_image, edited_images [2], winner, task. `winner` is 0 or 1; 1 or 2 (where a 2 occurs);
or A or B.

Results: <results_dir>/<model>.jsonl. At the end the table of all models in the folder is printed. Ties are wrong.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from paco_eval.data import Pictures, open_source
from paco_eval.results import Row, read_results, write_tables
from paco_eval.runner import Item, Prepared, exit_status, new_parser, parse, run_judge
from paco_judge.client import Pair
from paco_judge.questions import Question, load_question

HUB_NAME = "GEditBench-v2/VCReward-Bench"
QUESTION = "editing_consistency"
COLUMNS = ("key", "instruction", "winner", "task"), ("source_image", "edited_images")


def load_bench(dataset: str | None, question: Question, compares: bool) -> list[Item]:
    """Read all rows but not their images (see ``open_source``)."""
    source = open_source(dataset, HUB_NAME, *COLUMNS)
    from_one, items = any(str(row.get("winner")) == "2" for row, _ in source), []
    for index, (row, pictures) in enumerate(source):
        make = partial(prepare, row, pictures, question, compares, from_one)
        items.append(Item({"index": index, "key": str(row.get("key"))}, make))
    return items


def winner_index(winner: Any, from_one: bool) -> int:
    """0 or 1 for the ``winner`` of a row."""
    names, given = "12AB" if from_one else "01AB", str(winner).strip().upper()
    if len(given) != 1 or given not in names:
        raise ValueError(f"winner must be one of {', '.join(names)}, not {winner!r}")
    return names.index(given) % 2


def prepare(
    row: Row, pictures: Pictures, question: Question, compares: bool, from_one: bool
) -> Prepared:
    """A row's two questions and the function that makes its result."""
    instruction = str(row["instruction"]).strip()
    text = question.text(instruction=instruction, prompt=instruction)
    told = {"task": str(row["task"]), "winner": winner_index(row["winner"], from_one)}
    before, a, b = pictures()
    pairs = [
        Pair(before, one, text, (other,) if compares else ()) for one, other in ((a, b), (b, a))
    ]
    return pairs, lambda scores: told | {"scores": scores}


def parse_row(row: Row) -> Row:
    """The columns of the table; a tie is wrong."""
    scores = [float(score) for score in row["scores"]]
    right = scores[row["winner"]] > scores[1 - row["winner"]]
    return {"task": str(row["task"]), "right": right, "ties": scores[0] == scores[1]}


def save_tables(results_dir: Path, output: str) -> None:
    """Print and write the table: for each model accuracy per task and over all pairs."""
    results = read_results(results_dir, parse_row)
    by_model = results.groupby("model")
    table = results.pivot_table(index="model", columns="task", values="right", aggfunc="mean")
    table.insert(0, "pairs", by_model.size())
    table = table.assign(
        average=by_model["right"].mean(), ties=by_model["ties"].sum().astype(int)
    ).reset_index()
    write_tables(output, table)


def evaluate(args: argparse.Namespace) -> int:
    """Score and print the table; returns the number of rows without a result."""
    question = load_question(args.compare or args.question, ("instruction", "prompt"))
    items = load_bench(args.dataset, question, bool(args.compare))
    version = "" if question.name == QUESTION else f"-v{question.name}"
    failed = run_judge(args, items, (question,), version, compares=bool(args.compare))
    if failed < len(items):
        save_tables(Path(args.results_dir), args.output)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    text = f"hub name, folder or file; default: VCReward-Bench in ., .. or ../.., else {HUB_NAME}"
    parser.add_argument("--dataset", "--dataset_dir", help=text)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--question",
        default=QUESTION,
        metavar="NAME|FILE",
        help="about one edit; default: %(default)s",
    )
    asked.add_argument(
        "--compare", metavar="NAME|FILE", help="about both edits: is the first better?"
    )
    parser.add_argument(
        "--output", default="results_summary", help="the table: <output>.txt and <output>.tex"
    )
    return exit_status(evaluate, parse(parser, arguments))


if __name__ == "__main__":
    sys.exit(main())
