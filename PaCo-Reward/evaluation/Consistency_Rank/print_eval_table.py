"""A table over the results of eval_vllm.py: one row per model and prompt template.

python print_eval_table.py --results_dir results --output_file results_summary.txt --output_format txt [--print_std]
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

from rank_metrics import METRICS, mean_and_std

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
        FileNotFoundError: the folder holds no results. ValueError: a line is not a result.
    """
    files = sorted(results_dir.glob("*-v*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no results (<model>-v<template>.jsonl) in {results_dir}; run eval_vllm.py first")
    summaries = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
        if not rows:
            continue
        summary = {"name": file.stem, "items": len(rows), "ties": sum(row["metrics"]["ties"] for row in rows)}
        summaries.append(summary | {m: mean_and_std([row["metrics"][m] for row in rows]) for m in METRICS})
    return summaries


def cells(summaries: list[dict], print_std: bool, plus_minus: str) -> list[list[str]]:
    """The table as text, headings first."""
    table = [["model", "items", *(HEADINGS[metric] for metric in METRICS), "ties"]]
    for summary in summaries:
        numbers = []
        for metric in METRICS:
            mean, std = summary[metric]
            numbers.append(f"{mean:.4f}" + (f"{plus_minus}{std:.4f}" if print_std else ""))
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
        summaries = summarise(Path(args.results_dir))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    latex = args.output_format == "latex"
    table = cells(summaries, args.print_std, r" $\pm$ " if latex else " ± ")
    text = as_latex(table) if latex else as_text(table)
    Path(args.output_file).write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
