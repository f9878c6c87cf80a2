"""Write a page about a run, or about several side by side.

``python -m paco_grpo.report RUN_DIR [RUN_DIR …]``, or ``scripts/report.py``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from paco_judge.arguments import Parser
from paco_judge.errors import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if there is nothing to report on."""
    parser = Parser(prog="report.py", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "run_dir", type=Path, nargs="+", help="{save_dir}/{run_name} of a training run"
    )
    parser.add_argument("--title", default="", help="heading of the page (default: the run's name)")
    parser.add_argument(
        "--out",
        type=Path,
        help="the page (default: report.html in RUN_DIR, or compared.html in the first one)",
    )
    options = parser.parse_args(arguments)

    def run() -> None:
        from paco_grpo.report.compare import write_comparison
        from paco_grpo.report.page import Page, write_report
        from paco_grpo.report.run import read_run

        runs = [read_run(folder) for folder in options.run_dir]
        folder = options.run_dir[0]
        if len(runs) == 1:
            out = options.out or folder / "report.html"
            write_report(runs[0], out, Page(options.title))
        else:
            out = options.out or folder / "compared.html"
            write_comparison(runs, out, options.title)
        print(out)

    return run_command(run, OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
