"""EditReward-Bench: does the judge give the better of two edits the higher score?

  bash evaluate_vllm_PaCoReward.sh                                  PaCo-Reward-7B, vLLM here
  bash evaluate_vllm_PaCoReward.sh --model ../../saves/judge        your own judge
  bash evaluate_vllm_PaCoReward.sh --server http://127.0.0.1:8000   a running server
  bash evaluate_vllm_PaCoReward.sh --engine transformers            without vLLM

For each row the judge sees the input image with each of the two edits. Dimension prompt_following
asks whether the edit follows the instruction, consistency whether everything else stayed the same,
overall asks both and takes sqrt(prompt_following * consistency). Scores are P(Yes).

The data set is the hub's EditScore/EditReward-Bench, or with --dataset a folder of parquet files
(as `hf download` stores it) or of save_to_disk, or a .jsonl file whose image paths are relative to
it. Columns: key [2], instruction, input_image, output_images [2, the better first], task_type,
dimension.

Results: <results_dir>/<model>.jsonl (with --question: <model>-v<names>.jsonl). At the end the
tables of all models in the folder are printed (again with calculate_statistics.py).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from paco_eval.benchmark import (
    EditRows,
    Item,
    Row,
    exit_status,
    read_results,
    run_judge,
    write_tables,
)
from paco_eval.engines import new_parser, parse
from paco_judge.errors import UserError, run_command
from paco_judge.questions import EDITING, Pair, Question, editing_texts, load_editing_questions
from paco_judge.verdict import Verdict, editing_score

HUB_NAME = "EditScore/EditReward-Bench"
TABLES_HELP = """\
Tables over the results of EditReward-Bench: pairwise accuracy by group and by task type, for
each model and dimension.

python calculate_statistics.py --results_dir results --output results_summary [--backbone MODEL]

A pair is right when the better edit's score is higher (strict) or not lower (lenient). Groups and
`average` count every task type alike, as the authors' script does, `pair mean` every pair. `ties`
are pairs with equal scores; `-`: no such pairs.
"""
COLUMNS = ("key", "instruction", "task_type", "dimension")
GROUPS = {
    "object": ("subject-add", "subject-remove", "subject-replace"),
    "appearance": ("color_alter", "material_alter", "style_change", "tone_transfer"),
    "scene": ("background_change", "extract"),
    "advanced": ("ps_human", "text_change", "motion_change", "compose"),
}
GROUP_OF = {}
for _group, _tasks in GROUPS.items():
    GROUP_OF |= dict.fromkeys(_tasks, _group)
KINDS = ("strict", "lenient")


@dataclass(frozen=True)
class EditReward:
    """Rows with two edits of an image, the better one first."""

    source: EditRows
    questions: Sequence[Question]
    resize_edits: bool = False  # to the size of their input image, with Pillow's default resampling

    @classmethod
    def load(
        cls, dataset: str | None, questions: Sequence[Question], resize_edits: bool = False
    ) -> "EditReward":
        """The benchmark in a file, in a folder or on the hub (see ``EditRows``)."""
        source = EditRows(dataset, HUB_NAME, COLUMNS, "input_image", "output_images")
        return cls(source, questions, resize_edits)

    def items(self) -> list[Item]:
        """One for each row."""
        items = []
        for index, row in enumerate(self.source.rows):
            fields = {"index": index, "key": row.get("key"), "dimension": row.get("dimension")}
            items.append(Item(fields, row))
        return items

    def pairs(self, item: Item) -> list[Pair]:
        """All questions about the better edit, then about the worse one."""
        self._task(item)
        texts = self._texts(item)
        before, *edits = self.source.images(item.fields["index"])
        pairs = []
        for edit in edits:
            shown = edit.resize(before.size) if self.resize_edits else edit
            pairs += [Pair(before, shown, text) for text in texts.values()]
        return pairs

    def result(self, item: Item, scores: Sequence[float]) -> Row:
        """The answers about both edits, by what each is about, and the edits' scores."""
        about = list(self._texts(item))
        answers = []
        edit_scores = []
        for start in (0, len(about)):
            of_edit = dict(zip(about, scores[start : start + len(about)], strict=True))
            answers.append(of_edit)
            edit_scores.append(editing_score(*(Verdict(p_yes) for p_yes in of_edit.values())))
        return {"task_type": self._task(item), "answers": answers, "scores": edit_scores}

    def _task(self, item: Item) -> str:
        return str(item.row["task_type"])

    def _texts(self, item: Item) -> dict[str, str]:
        return editing_texts(self.questions, item.row["instruction"], item.row["dimension"])


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = new_parser(__doc__)
    parser.add_argument(
        "--dataset",
        "--dataset_dir",
        "--benchmark_dir",
        help="hub name, folder or file; default: EditReward-Bench in ., .. or ../.., else "
        + HUB_NAME,
    )
    parser.add_argument(
        "--question",
        nargs="+",
        metavar="NAME|FILE",
        help="shipped templates or text files: is the rest kept, is the instruction followed; one "
        f"alone decides every dimension; default: {' '.join(EDITING)}",
    )
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
    version = ""
    if args.question:
        version = "-v" + "+".join(question.name for question in questions)
    benchmark = EditReward.load(args.dataset, questions, args.resize_edits)
    num_failed = run_judge(args, benchmark, questions, version, resize_edits=args.resize_edits)
    if num_failed < len(benchmark.source.rows):
        save_tables(Path(args.results_dir), args.output)
    return num_failed


def main(arguments: list[str] | None = None) -> int:
    """The command ``evaluation.py`` of Edit-Bench, which evaluate_vllm_PaCoReward.sh runs."""
    return exit_status(evaluate, command_line(arguments))


def parse_row(row: Row) -> Row:
    """The columns that the tables need."""
    better, worse = map(float, row["scores"])
    task = str(row["task_type"])
    return {
        "dimension": row["dimension"],
        "group": GROUP_OF.get(task, "other"),
        "task type": task,
        "strict": better > worse,
        "lenient": better >= worse,
        "ties": better == worse,
    }


def group_table(results: pd.DataFrame) -> pd.DataFrame:
    """Two rows (strict, lenient) for each model and dimension.

    Its columns are the groups, ``average`` and ``pair mean``.
    """
    keys = ["model", "dimension", "right when"]
    judged = results.melt(
        ["model", "dimension", "group", "task type", "ties"], [*KINDS], "right when", "right"
    )
    judged["right when"] = pd.Categorical(judged["right when"], KINDS)
    pairs = judged.groupby(keys, observed=True)
    tasks = judged.groupby([*keys, "group", "task type"], observed=True)["right"].mean()
    groups = tasks.groupby([*keys, "group"], observed=True).mean()
    table = groups.unstack("group").reindex(columns=[*GROUPS])
    table.insert(0, "pairs", pairs.size())
    table["average"] = tasks.groupby(keys, observed=True).mean()
    table["pair mean"] = pairs["right"].mean()
    table["ties"] = pairs["ties"].sum().astype(int)
    return table.reset_index()


def task_table(results: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, group and task type.

    Its columns are the pairs, strict and lenient accuracy of each dimension.
    """
    shares = results.groupby(["model", "group", "task type", "dimension"]).agg(
        pairs=("strict", "size"), strict=("strict", "mean"), lenient=("lenient", "mean")
    )
    table = shares.unstack("dimension")
    table["pairs"] = table["pairs"].fillna(0).astype(int)
    table = table.swaplevel(axis=1).sort_index(axis=1, level=0, sort_remaining=False)
    table.columns = [f"{dimension}: {column}" for dimension, column in table.columns]
    return table.reset_index()


def save_tables(results_dir: Path, output: str, model: str | None = None) -> None:
    """Print and write the tables; ``model``: only of files whose name begins with it."""
    results = read_results(results_dir, parse_row)
    if model:
        results = results[results["model"].str.startswith(Path(model).name)]
        if results.empty:
            raise UserError(f"no results of {model} in {results_dir}")
    write_tables(output, group_table(results), task_table(results))


def tables_main(arguments: list[str] | None = None) -> int:
    """The command ``calculate_statistics.py``."""
    parser = new_parser(TABLES_HELP)
    parser.add_argument("--results_dir", "--result_dir", default="results")
    parser.add_argument(
        "--output", default="results_summary", help="written as <output>.txt and <output>.tex"
    )
    parser.add_argument("--backbone", help="only the results of this model")
    args = parser.parse_args(arguments)
    save = partial(save_tables, Path(args.results_dir), args.output, args.backbone)
    return run_command(save, OSError)
