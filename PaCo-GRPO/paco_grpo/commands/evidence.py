"""Print a run as a row of docs/evidence.md: ``python -m paco_grpo.commands.evidence RUN_DIR``."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from paco_grpo.monitoring.console import means
from paco_judge.errors import UserError, run_command
from paco_judge.files import read_json_lines


def row(run: Path) -> str:
    """A row of Markdown: what was trained, on what, at which commit, and what came out.

    Args:
        run: The folder of a run with ``config.yaml``, ``plan.json`` and ``metrics.jsonl``.

    Raises:
        UserError: It has no finished epoch.
    """
    rows = read_json_lines(run / "metrics.jsonl")
    epochs = [row for row in rows if row["phase"] == "train"]
    if not epochs:
        raise UserError(f"{run} has no finished epoch")
    options = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    seconds = statistics.median(row["time/epoch_s"] for row in epochs)
    hours = epochs[-1]["train_time"] / 3600
    trained = (
        f"{options['pretrained']['model']}, `{options['train']['loss_type']}`, "
        f"{options['train']['resolution']} → {options['test']['resolution']} px"
    )
    machine = f"{plan['num_processes']} × {plan['device']}"
    seen = [f"{len(epochs)} epochs in {hours:.1f} h, median {seconds:.1f} s", *changes(rows)]
    return f"| {trained} | {machine} | {commit()} | {'; '.join(seen)} |"


def changes(rows: list[dict[str, Any]]) -> list[str]:
    """Each reward of the first and of the last evaluation, with its standard error."""
    evaluations = [row for row in rows if row["phase"] == "eval"]
    if len(evaluations) < 2:
        return ["no evaluation before and after"]
    first = means(evaluations[0], "eval/")
    last = means(evaluations[-1], "eval/")
    texts = []
    for name in first.keys() & last.keys():
        error = evaluations[-1][f"eval/{name}_stderr"]
        texts.append(f"{name} {first[name]:.3f} → {last[name]:.3f} ± {error:.3f}")
    return sorted(texts)


def commit() -> str:
    """The commit of the clone that this package lies in."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "not in a clone"


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 2
    print(row(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:]), OSError))
