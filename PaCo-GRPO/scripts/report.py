"""Write one self-contained page about a run: images before and after, curves, signs of trouble."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if there is nothing to report on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path, help="{save_dir}/{run_name} of a training run")
    judges = "files of `paco-reward accuracy --output`, the base's first"
    parser.add_argument("--judge", nargs="+", default=(), type=Path, metavar="JSON", help=judges)
    stages = "{stage: seconds} of the whole pipeline"
    parser.add_argument("--stage-seconds", type=Path, metavar="JSON", help=stages)
    parser.add_argument("--title", help="heading of the page (default: the run's name)")
    parser.add_argument("--out", type=Path, help="the page (default RUN_DIR/report.html)")
    options = parser.parse_args(arguments)
    run_dir = options.run_dir
    out = options.out or run_dir / "report.html"

    # PyTorch takes seconds to import: --help and wrong arguments do not wait for it.
    from paco_grpo.report import write_report

    try:
        write_report(run_dir, out, options.judge, options.stage_seconds, options.title)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        problem = f"{type(error).__name__}: {error}"
        print(f"error: no report on {run_dir}: {problem}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
