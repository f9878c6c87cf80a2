"""``python -m paco_grpo.report RUN_DIR [--judge JSON …] [--out report.html]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paco_grpo.report.data import ReportError
from paco_grpo.report.page import write_report


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1, with one message, if there is nothing to report on."""
    parser = argparse.ArgumentParser(prog="python -m paco_grpo.report", description="Make one page of a run directory.")
    parser.add_argument("run_dir", type=Path, help="{save_dir}/{run_name} of a training run")
    parser.add_argument("--judge", nargs="+", default=(), type=Path, metavar="JSON",
                        help="files of `paco-reward accuracy --output`, the base's first")  # fmt: skip
    parser.add_argument("--stage-seconds", type=Path, metavar="JSON", help="{stage: seconds} of the whole pipeline")
    parser.add_argument("--title")
    parser.add_argument("--out", type=Path, help="the page (default RUN_DIR/report.html); PNGs go next to it")
    arguments = parser.parse_args(argv)
    try:
        files = write_report(
            arguments.run_dir, arguments.out or arguments.run_dir / "report.html", judge=arguments.judge,
            stage_seconds=arguments.stage_seconds, title=arguments.title,
        )  # fmt: skip
    except (ReportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(str(path) for path in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
