"""VCReward-Bench (arXiv 2603.28547): does the judge agree with experts on which of two edits is
more consistent?

  hf download GEditBench-v2/VCReward-Bench --repo-type dataset --local-dir VCReward-Bench
  python evaluation.py --model ../../models/judge --engine transformers   scores each edit
  python evaluation.py --server http://127.0.0.1:8000 --compare FILE      compares both edits

The judge scores each edit against its source image; the higher score wins. A judge that compares
directly is asked with --compare: the source and both edits are shown, in both orders; Yes means
that the first edit is better.

Columns: key, instruction, source_image, edited_images [2], winner, task. `winner` is 0 or 1; 1 or 2
(where a 2 occurs); or A or B.

Results: <results_dir>/<model>.jsonl. At the end the table of all models in the folder is printed.
Ties are wrong.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_eval.benchmark import (
    Item,
    Row,
    exit_status,
    new_parser,
    parse,
    read_results,
    run_judge,
)
from paco_eval.edit import EditRows, write_tables
from paco_judge.questions import Pair, Question, load_question

HUB_NAME = "GEditBench-v2/VCReward-Bench"
QUESTION = "editing_consistency"
COLUMNS = ("key", "instruction", "winner", "task")


@dataclass(frozen=True)
class VCReward:
    """Rows with two edits of an image and an expert's choice."""

    source: EditRows
    question: Question
    compares: bool  # the question is about both edits
    from_one: bool  # winners are 1 and 2, not 0 and 1

    def items(self) -> list[Item]:
        """One for each row."""
        items = []
        for index, row in enumerate(self.source.rows):
            items.append(Item({"index": index, "key": str(row.get("key"))}, row))
        return items

    def pairs(self, item: Item) -> list[Pair]:
        """The question about the first edit, then about the second."""
        instruction = str(item.row["instruction"]).strip()
        text = self.question.text(instruction=instruction, prompt=instruction)
        self._choice(item)
        before, first, second = self.source.images(item.fields["index"])
        if self.compares:
            return [Pair(before, first, text, (second,)), Pair(before, second, text, (first,))]
        return [Pair(before, first, text), Pair(before, second, text)]

    def result(self, item: Item, scores: Sequence[float]) -> Row:
        """What the table needs."""
        return self._choice(item) | {"scores": list(scores)}

    def _choice(self, item: Item) -> Row:
        winner = winner_index(item.row["winner"], self.from_one)
        return {"task": str(item.row["task"]), "winner": winner}


def winner_index(winner: Any, from_one: bool) -> int:
    """0 or 1 for the ``winner`` of a row."""
    names = "12AB" if from_one else "01AB"
    name = str(winner).strip().upper()
    if len(name) != 1 or name not in names:
        raise ValueError(f"winner must be one of {', '.join(names)}, not {winner!r}")
    return names.index(name) % 2


def parse_row(row: Row) -> Row:
    """The columns of the table; a tie is wrong."""
    scores = [float(score) for score in row["scores"]]
    is_right = scores[row["winner"]] > scores[1 - row["winner"]]
    return {"task": str(row["task"]), "right": is_right, "ties": scores[0] == scores[1]}


def save_tables(results_dir: Path, output: str) -> None:
    """Print and write the table: for each model accuracy per task and over all pairs."""
    results = read_results(results_dir, parse_row)
    by_model = results.groupby("model")
    table = results.pivot_table(index="model", columns="task", values="right", aggfunc="mean")
    table.insert(0, "pairs", by_model.size())
    table["average"] = by_model["right"].mean()
    table["ties"] = by_model["ties"].sum().astype(int)
    write_tables(output, table.reset_index())


def evaluate(args: argparse.Namespace) -> int:
    """Score and print the table; returns the number of rows without a result."""
    question = load_question(args.compare or args.question, ("instruction", "prompt"))
    compares = bool(args.compare)
    source = EditRows(args.dataset, HUB_NAME, COLUMNS, "source_image", "edited_images")
    from_one = any(str(row.get("winner")) == "2" for row in source.rows)
    benchmark = VCReward(source, question, compares, from_one)
    version = "" if question.name == QUESTION else f"-v{question.name}"
    num_failed = run_judge(args, benchmark, (question,), version, compares=compares)
    if num_failed < len(source.rows):
        save_tables(Path(args.results_dir), args.output)
    return num_failed


def main(arguments: list[str] | None = None) -> int:
    """The command ``evaluation.py`` of VCReward-Bench."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--dataset",
        "--dataset_dir",
        help="hub name, folder or file; default: VCReward-Bench in ., .. or ../.., else "
        + HUB_NAME,
    )
    questions = parser.add_mutually_exclusive_group()
    questions.add_argument(
        "--question",
        default=QUESTION,
        metavar="NAME|FILE",
        help="about one edit; default: %(default)s",
    )
    questions.add_argument(
        "--compare", metavar="NAME|FILE", help="about both edits: is the first better?"
    )
    parser.add_argument(
        "--output", default="results_summary", help="the table: <output>.txt and <output>.tex"
    )
    return exit_status(evaluate, parse(parser, arguments))
