"""A table over the results of eval_vllm.py and eval.py: one row per model and prompt template, and per baseline.

python print_eval_table.py --results_dir results --output_file results_summary.txt --output_format txt [--print_std]

Means over items; with --print_std ± their standard deviation over items. LaTeX needs the package booktabs.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from rank_metrics import METRICS, mean_and_std

from paco_eval.errors import BenchError
from paco_eval.tables import as_latex, as_text

HEADINGS = {
    "accuracy": "accuracy",
    "kendalltau": "tau-b",
    "spearmanr": "rho",
    "footrule": "footrule",
    "top1": "top-1",
    "bottom1": "bottom-1",
    "top_bottom_mean": "top/bottom",
    "kendalltau_published": "tau (published)",
    "spearmanr_published": "rho (published)",
}


def summarise(results_dir: Path) -> list[dict]:
    """One summary per results file: name, items, ties, and (mean, std) of each metric.

    Raises:
        BenchError: the folder holds no results, or a line is not a result.
    """
    summaries = []
    for file in sorted(results_dir.glob("*.jsonl")):
        lines = file.read_text(encoding="utf-8").split("\n")
        rows = [_metrics(line, f"{file} line {number}") for number, line in enumerate(lines, start=1) if line]
        if rows:
            summary = {"name": file.stem, "items": len(rows), "ties": sum(row["ties"] for row in rows)}
            summaries.append(summary | {m: mean_and_std([row[m] for row in rows]) for m in METRICS})
    if not summaries:
        raise BenchError(f"no results (<model>-v<template>.jsonl) in {results_dir}; run eval_vllm.py first")
    return summaries


def _metrics(line: str, place: str) -> dict[str, float]:
    try:
        metrics = json.loads(line)["metrics"]
        return {name: float(metrics[name]) for name in (*METRICS, "ties")}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{place} is no result of eval_vllm.py or eval.py: {error!r}") from error


def cells(summaries: list[dict], print_std: bool) -> list[list[str]]:
    """The table as text, headings first."""
    table = [["model", "items", *(HEADINGS[metric] for metric in METRICS), "ties"]]
    for summary in summaries:
        numbers = []
        for metric in METRICS:
            mean, std = summary[metric]
            numbers.append(f"{mean:.4f} ± {std:.4f}" if print_std else f"{mean:.4f}")
        table.append([summary["name"], str(summary["items"]), *numbers, f"{summary['ties']:.0f}"])
    return table


def main(arguments: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results_dir", default="results")
    parser.add_argument("--output_file", default="results_summary.txt")
    parser.add_argument("--output_format", choices=("txt", "latex"), default="txt")
    parser.add_argument("--print_std", action="store_true", help="mean and standard deviation over items")
    args = parser.parse_args(arguments)
    try:
        table = cells(summarise(Path(args.results_dir)), args.print_std)
        text = as_latex(table) if args.output_format == "latex" else as_text(table)
        Path(args.output_file).write_text(text, encoding="utf-8")
    except (OSError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
