"""Tables over the results of evaluation.py: pairwise accuracy by group and by task type, for each model and dimension.

python calculate_statistics.py --results_dir results --output results_summary

A pair is right when the better edit's score is higher (strict) or not lower (lenient). Groups and `average` count every
pair alike, `task mean` every task type. `ties` are pairs with equal scores; `-`: no such pairs among the results.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from edit_metrics import GROUPS, OTHER, Summary, group_of, summarise

from paco_eval.errors import BenchError
from paco_eval.tables import as_latex, as_text
from paco_judge.questions import EDIT_DIMENSIONS

KINDS = ("strict", "lenient")
Table = list[list[str]]


def read_results(results_dir: Path) -> dict[str, dict[str, Summary]]:
    """The summaries of every results file by model (the file's name).

    Raises:
        BenchError: no results there, or a line that is no result of evaluation.py.
    """
    models = {}
    for file in sorted(results_dir.glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [_row(line, f"{file} line {number}") for number, line in enumerate(lines, start=1) if line]
        if rows:
            models[file.stem] = summarise(rows)
    if not models:
        raise BenchError(f"no results (<model>.jsonl) in {results_dir}; run evaluate_vllm_PaCoReward.sh first")
    return models


def _row(line: str, place: str) -> dict:
    try:
        row = json.loads(line)
        better, worse = row["scores"]
        if row["dimension"] not in EDIT_DIMENSIONS or not all(isinstance(x, float) for x in (better, worse)):
            raise ValueError(f"dimension {row['dimension']!r} with scores {row['scores']}")
        return {"task_type": str(row["task_type"]), "dimension": row["dimension"], "scores": (better, worse)}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{place} is no result of evaluation.py: {error!r}") from error


def group_table(models: dict[str, dict[str, Summary]]) -> Table:
    """Two rows (strict, lenient) for each model and dimension; a column for each group, average, task mean."""
    every = [summary for summaries in models.values() for summary in summaries.values()]
    groups = [group for group in (*GROUPS, OTHER) if group in GROUPS or any(group in one.groups for one in every)]
    table = [["model", "dimension", "right when", "pairs", *groups, "average", "task mean", "ties"]]
    for model, summaries in models.items():
        for dimension, summary in summaries.items():
            for position, kind in enumerate(KINDS):
                shares = [_share(summary.groups.get(group), kind) for group in groups]
                means = [_share(summary.average, kind), f"{summary.task_mean[position]:.4f}"]
                whole = summary.average
                table.append([model, dimension, kind, str(whole.pairs), *shares, *means, str(whole.ties)])
    return table


def task_table(models: dict[str, dict[str, Summary]]) -> Table:
    """A row for each model and task type; for each dimension pairs, strict and lenient accuracy."""
    headings = [heading for name in EDIT_DIMENSIONS for heading in (f"{name}: pairs", *KINDS)]
    table = [["model", "group", "task type", *headings]]
    for model, summaries in models.items():
        found = {task for summary in summaries.values() for task in summary.tasks}
        known = [task for tasks in GROUPS.values() for task in tasks]
        for task in [*known, *sorted(found - set(known))]:
            cells = []
            for dimension in EDIT_DIMENSIONS:
                one = summaries[dimension].tasks.get(task) if dimension in summaries else None
                cells += [str(one.pairs) if one else "0", *(_share(one, kind) for kind in KINDS)]
            table.append([model, group_of(task), task, *cells])
    return table


def _share(accuracy, kind: str) -> str:
    return f"{getattr(accuracy, kind):.4f}" if accuracy else "-"


def save_tables(results_dir: Path, output: Path) -> str:
    """Write `output`.txt and `output`.tex from all results in the folder; returns the text.

    Raises:
        BenchError: as read_results. OSError: a file that cannot be read or written.
    """
    models = read_results(results_dir)
    tables = [(group_table(models), 3), (task_table(models), 3)]
    text = "\n".join(as_text(table) for table, _ in tables)
    # Names are appended: with_suffix would cut a name such as v1.5 short.
    Path(f"{output}.txt").write_text(text, encoding="utf-8")
    Path(f"{output}.tex").write_text("\n".join(as_latex(table, names) for table, names in tables), encoding="utf-8")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
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
