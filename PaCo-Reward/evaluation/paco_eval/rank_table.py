"""A table of the results of eval_vllm.py and eval.py: means over items, one row per model and
prompt template.

python print_eval_table.py --results_dir results --output_file results_summary.txt \\
    --output_format txt [--print_std]
"""

import argparse
from pathlib import Path

import pandas as pd

from paco_eval.options import exit_status, new_parser
from paco_eval.rank import METRICS
from paco_eval.results import Row, as_latex, as_text, read_results


def parse_row(row: Row) -> Row:
    """The columns that the table needs."""
    return {name: float(row["metrics"][name]) for name in (*METRICS, "ties")}


def make_table(results_dir: str, print_std: bool) -> pd.DataFrame:
    """A row of means for each results file; ± standard deviations, without Bessel's correction."""
    by_model = read_results(Path(results_dir), parse_row).groupby("model")
    table = by_model[list(METRICS)].mean()
    if print_std:
        deviations = by_model[list(METRICS)].std(ddof=0)
        table = table.map("{:.4f}".format) + " ± " + deviations.map("{:.4f}".format)
    table = table.rename(columns=METRICS)
    table.insert(0, "items", by_model.size())
    table["ties"] = by_model["ties"].sum().astype(int)
    return table.reset_index()


def print_table(args: argparse.Namespace) -> None:
    """Print and write the table."""
    table = make_table(args.results_dir, args.print_std)
    text = as_latex(table) if args.output_format == "latex" else as_text(table)
    Path(args.output_file).write_text(text, encoding="utf-8")
    print(text, end="")


def main(arguments: list[str] | None = None) -> int:
    """The command ``print_eval_table.py``."""
    parser = new_parser(__doc__)
    parser.add_argument("--results_dir", default="results")
    parser.add_argument("--output_file", default="results_summary.txt")
    parser.add_argument("--output_format", choices=("txt", "latex"), default="txt")
    parser.add_argument(
        "--print_std", action="store_true", help="mean and standard deviation over items"
    )
    return exit_status(print_table, parser.parse_args(arguments))
