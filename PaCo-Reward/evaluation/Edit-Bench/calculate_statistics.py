"""Tables over the results of evaluation.py: pairwise accuracy by group and by task type, for each model and dimension.

python calculate_statistics.py --results_dir results --output results_summary

A pair is right when the better edit's score is higher (strict) or not lower (lenient). Groups and `average` count every
pair alike, `task mean` every task type. `ties` are pairs with equal scores; `-`: no such pairs among the results.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from paco_eval.results import BenchError, Row, Table, as_latex, as_text, read_results
from paco_judge.questions import EDIT_DIMENSIONS

GROUPS = {
    "object": ("subject-add", "subject-remove", "subject-replace"),
    "appearance": ("color_alter", "material_alter", "style_change", "tone_transfer"),
    "scene": ("background_change", "extract"),
    "advanced": ("ps_human", "text_change", "motion_change", "compose"),
}
OTHER = "other"  # task types of the user's own data set
KINDS = ("strict", "lenient")


def accuracy(rows: Sequence[Row], kind: str) -> float:
    """Share in [0, 1] of rows whose better edit scores higher (strict), or not lower (lenient); NaN for no rows."""
    right = [
        better > worse or (kind == "lenient" and better == worse) for better, worse in (row["scores"] for row in rows)
    ]
    return sum(right) / len(right) if right else math.nan


def group_of(task_type: str) -> str:
    """The group of a task type; ``other`` for one that EditReward-Bench does not have."""
    return next((group for group, tasks in GROUPS.items() if task_type in tasks), OTHER)


def task_order(tasks: Iterable[str]) -> list[str]:
    """All task types of EditReward-Bench, then the others by name."""
    known = [task for group in GROUPS.values() for task in group]
    return [*known, *sorted(set(tasks) - set(known))]


def group_table(models: dict[str, list[Row]]) -> Table:
    """Two rows (strict, lenient) for each model and dimension; a column for each group, average, task mean."""
    found = {group_of(row["task_type"]) for rows in models.values() for row in rows}
    groups = [*GROUPS, *([OTHER] if OTHER in found else [])]
    table = [["model", "dimension", "right when", "pairs", *groups, "average", "task mean", "ties"]]
    for model, rows in models.items():
        for dimension in EDIT_DIMENSIONS:
            selected = [row for row in rows if row["dimension"] == dimension]
            parts = [[row for row in selected if group_of(row["task_type"]) == group] for group in groups]
            tasks = {row["task_type"]: [] for row in selected}
            for row in selected:
                tasks[row["task_type"]].append(row)
            ties = str(sum(better == worse for better, worse in (row["scores"] for row in selected)))
            for kind in KINDS if selected else ():
                task_mean = sum(accuracy(own, kind) for own in tasks.values()) / len(tasks)
                cells = [_cell(accuracy(part, kind)) for part in (*parts, selected)]
                table.append([model, dimension, kind, str(len(selected)), *cells, _cell(task_mean), ties])
    return table


def task_table(models: dict[str, list[Row]]) -> Table:
    """A row for each model and task type; for each dimension pairs, strict and lenient accuracy."""
    headings = [heading for name in EDIT_DIMENSIONS for heading in (f"{name}: pairs", *KINDS)]
    table = [["model", "group", "task type", *headings]]
    for model, rows in models.items():
        for task in task_order(row["task_type"] for row in rows):
            cells = []
            for dimension in EDIT_DIMENSIONS:
                own = [row for row in rows if (row["task_type"], row["dimension"]) == (task, dimension)]
                cells += [str(len(own)), *(_cell(accuracy(own, kind)) for kind in KINDS)]
            table.append([model, group_of(task), task, *cells])
    return table


def _cell(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.4f}"


def parse_row(row: Row) -> Row:
    """The parts of a row of a results file that the tables need. Raises ValueError."""
    better, worse = row["scores"]
    if row["dimension"] not in EDIT_DIMENSIONS or not all(
        isinstance(score, float) and 0 <= score <= 1 for score in (better, worse)
    ):
        raise ValueError(f"dimension {row['dimension']!r} with scores {row['scores']}")
    return {"task_type": str(row["task_type"]), "dimension": row["dimension"], "scores": (better, worse)}


def save_tables(results_dir: Path, output: Path) -> str:
    """Write ``<output>.txt`` and ``<output>.tex`` from all results in the folder; returns the text.

    Raises:
        BenchError: No results, or an invalid line.
        OSError: A file cannot be read or written.
    """
    models = read_results(results_dir, parse_row, "evaluate_vllm_PaCoReward.sh")
    tables = [group_table(models), task_table(models)]
    text = "\n".join(map(as_text, tables))
    # Suffixes are appended because with_suffix would cut a name like v1.5.
    Path(f"{output}.txt").write_text(text, encoding="utf-8")
    Path(f"{output}.tex").write_text("\n".join(as_latex(table, names=3) for table in tables), encoding="utf-8")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results_dir", default="results")
    parser.add_argument("--output", default="results_summary", help="written as <output>.txt and <output>.tex")
    args = parser.parse_args(arguments)
    try:
        print(save_tables(Path(args.results_dir), Path(args.output)), end="")
    except (OSError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
