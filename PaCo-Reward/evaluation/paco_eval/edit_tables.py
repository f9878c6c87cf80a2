"""Tables over the results of EditReward-Bench: pairwise accuracy by group and by task type, for
each model and dimension.

python calculate_statistics.py --results_dir results --output results_summary [--backbone MODEL]

A pair is right when the better edit's score is higher (strict) or not lower (lenient). Groups and
`average` count every task type alike, as the authors' script does, `pair mean` every pair. `ties`
are pairs with equal scores; `-`: no such pairs.
"""

import argparse
from pathlib import Path

import pandas as pd

from paco_eval.options import exit_status, new_parser
from paco_eval.results import BenchError, Row, read_results, write_tables

GROUPS = {
    "object": ("subject-add", "subject-remove", "subject-replace"),
    "appearance": ("color_alter", "material_alter", "style_change", "tone_transfer"),
    "scene": ("background_change", "extract"),
    "advanced": ("ps_human", "text_change", "motion_change", "compose"),
}
GROUP_OF = {task: group for group, tasks in GROUPS.items() for task in tasks}
KINDS = ("strict", "lenient")


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
            raise BenchError(f"no results of {model} in {results_dir}")
    write_tables(output, group_table(results), task_table(results))


def print_tables(args: argparse.Namespace) -> None:
    """``save_tables`` of the command line."""
    save_tables(Path(args.results_dir), args.output, args.backbone)


def main(arguments: list[str] | None = None) -> int:
    """The command ``calculate_statistics.py``."""
    parser = new_parser(__doc__)
    parser.add_argument("--results_dir", "--result_dir", default="results")
    parser.add_argument(
        "--output", default="results_summary", help="written as <output>.txt and <output>.tex"
    )
    parser.add_argument("--backbone", help="only the results of this model")
    return exit_status(print_tables, parser.parse_args(arguments))
