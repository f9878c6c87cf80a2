"""A table of the results of eval_vllm.py and eval.py: means over items, one row per model and prompt template.

python print_eval_table.py --results_dir results --output_file results_summary.txt --output_format txt [--print_std]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # paco_eval

import paco_eval  # noqa: F401 - first: it names the packages that are missing

# isort: split
import pandas as pd
from eval import METRICS

from paco_eval.results import as_latex, as_text, read_results
from paco_eval.runner import exit_status, new_parser


def make_table(results_dir: str, print_std: bool) -> pd.DataFrame:
    """A row of means (± standard deviations, without Bessel's correction) for each results file."""
    metrics = lambda row: {name: float(row["metrics"][name]) for name in (*METRICS, "ties")}
    by_model = read_results(Path(results_dir), metrics).groupby("model")
    table = by_model[list(METRICS)].mean()
    if print_std:
        deviations = by_model[list(METRICS)].std(ddof=0)
        table = table.map("{:.4f}".format) + " ± " + deviations.map("{:.4f}".format)
    table = table.rename(columns=METRICS)
    table.insert(0, "items", by_model.size())
    table["ties"] = by_model["ties"].sum().astype(int)
    return table.reset_index()


def tables(args: argparse.Namespace) -> None:
    """Print and write the table."""
    table = make_table(args.results_dir, args.print_std)
    text = as_latex(table) if args.output_format == "latex" else as_text(table)
    Path(args.output_file).write_text(text, encoding="utf-8")
    print(text, end="")


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--results_dir", default="results")
    parser.add_argument("--output_file", default="results_summary.txt")
    parser.add_argument("--output_format", choices=("txt", "latex"), default="txt")
    parser.add_argument(
        "--print_std", action="store_true", help="mean and standard deviation over items"
    )
    return exit_status(tables, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
