"""RL of a toy editor on a CPU: the driver behind `bash quickstart/editing.sh`.

The editing task is rendered ("make the star blue" on a 2x2 scene), PaCo-GRPO trains an editor on the oracle's score by the
command that a user with GPUs types, and a report shows reference images and edits before and after. There is no judge: the
toy judge compares two panels and cannot read instructions. Everything is written to quickstart/out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paco_toy.console import Console, TimeLeft, columns
from paco_toy.drivers import drive, new_parser, parse_arguments
from paco_toy.processes import Commands, QuickstartError
from paco_toy.quickstart import REPO
from paco_toy.stages import EpochProgress, cpu_processes, resolutions
from paco_toy.summary import read_rows, versions

# Editor -> training script in PaCo-GRPO/scripts/single_node, and its configuration.
EDITORS = {
    "flux_kontext": ("train_flux_kontext.sh", "toy_kontext"),
    "qwen_image_edit": ("train_qwenimage_edit.sh", "toy_qwen_edit"),
}
MEASURES = {
    "oracle_edit": "edit score, the reward", "oracle_followed": "instruction followed", "oracle_kept": "the rest is kept",
}  # fmt: skip
STAGES = {"edits": 15.0, "rl": 480.0, "report": 15.0}  # seconds on two cores


def scores(evaluation: Path) -> tuple[np.ndarray, list[str | None]]:
    """Scores of MEASURES, float64 (images, 3), and the images' categories, of one evaluation folder.

    Raises:
        QuickstartError: A score is missing.
    """
    rows = read_rows(evaluation / "eval_data.jsonl")
    try:
        values = np.array([[row["rewards"][name] for name in MEASURES] for row in rows], dtype=np.float64)
    except (KeyError, TypeError) as error:
        raise QuickstartError(f"{evaluation}/eval_data.jsonl lacks a score ({error})") from error
    return values, [row["category"] for row in rows]


def measure(run: Path) -> dict[str, Any]:
    """First and last evaluation of a run: {"all": …, "<category>": …} -> measure -> before, after, gain and standard errors.

    The gain's standard error is paired: both evaluations use the same edits and noise.

    Raises:
        QuickstartError: The run lacks two evaluations of the same edits.
    """
    evaluations = sorted((run / "eval").glob("epoch_*"))
    if len(evaluations) < 2:
        raise QuickstartError(f"{run}/eval has {len(evaluations)} evaluations; one before and one after training are needed")
    (before, categories), (after, others) = scores(evaluations[0]), scores(evaluations[-1])
    if categories != others:
        raise QuickstartError(f"{run}/eval: the first and the last evaluation are not of the same edits")
    groups = {"all": [True] * len(categories)}
    groups |= {str(c): [other == c for other in categories] for c in sorted({c for c in categories if c is not None})}
    found: dict[str, Any] = {}
    for group, chosen in groups.items():
        found[group] = {"num_images": int(np.sum(chosen))}
        for column, name in enumerate(MEASURES):
            pair = before[chosen, column], after[chosen, column]
            values = {"before": pair[0], "after": pair[1], "gain": pair[1] - pair[0]}
            found[group][name] = {key: float(value.mean()) for key, value in values.items()}
            errors = {f"{key}_stderr": float(v.std(ddof=1) / math.sqrt(len(v))) for key, v in values.items()}
            found[group][name] |= errors
    return found


def table(found: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """The small table at the end."""
    head = f"held-out edits at {sizes['test_resolution']} px (trained at {sizes['train_resolution']} px)"
    rows = [(head, "before", "after", "change")]
    for group, values in found.items():
        rows.append(("all" if group == "all" else f"result is a {group}", f"({values['num_images']} edits)"))
        for name, words in MEASURES.items():
            m = values[name]
            cells = [f"{m[when]:.3f} ±{m[f'{when}_stderr']:.3f}" for when in ("before", "after")]
            rows.append((f"  {words}", *cells, f"{m['gain']:+.3f} ±{m['gain_stderr']:.3f}"))
    return columns(rows)


def work(arguments: argparse.Namespace) -> None:
    """Render the task, run RL by the commands of the guides, report.

    Raises:
        QuickstartError: Something needed is missing, or a command failed.
    """
    name, seed, out, grpo = arguments.editor, arguments.seed, arguments.out.resolve(), REPO / "PaCo-GRPO"
    script, config = EDITORS[name]
    if not list((REPO / "quickstart" / "models" / name).rglob("*.safetensors")):
        raise QuickstartError(
            f"the toy base quickstart/models/{name} is missing. Restore it (git checkout -- quickstart/models) "
            f"or build it (in tools/: python -m toy_models.build {name} --out ../quickstart/models)."
        )
    run, edits = out / "runs" / f"{config}_seed{seed}", out / "world" / f"edits_seed{seed}"
    page = out / f"editing_{name}.html"
    if arguments.fresh:
        shutil.rmtree(run, ignore_errors=True)
    python = os.environ.get("PYTHON") or sys.executable
    console = Console(TimeLeft(STAGES))
    console.stage_name = "rl"
    commands = Commands(out / "logs", console.progress)
    try:
        if not (edits / "test_metadata.jsonl").is_file():  # the last file to be written
            command = [python, "-m", "paco_toy.edits", "--seed", seed, "--out", edits]
            commands.run(command, REPO, f"edits-{seed}", "rendering", span=(0.0, 0.0))
        command = ["bash", f"scripts/single_node/{script}", config, f"--config.seed={seed}",
                   f"--config.dataset={os.path.relpath(edits, grpo)}", f"--config.save_dir={os.path.relpath(run.parent, grpo)}",
                   f"--config.run_name={run.name}", "--config.resume_from=latest", f"--config.max_train_minutes={arguments.minutes}",
                   *arguments.overrides]  # fmt: skip
        commands.run(command, grpo, run.name, "training", env={"PYTHON": python, **cpu_processes()},
                     progress=EpochProgress(run, arguments.minutes, "oracle_edit", "edit score"))  # fmt: skip
        command = [python, "-m", "paco_grpo.report", run, "--title", f"RL of a toy editor: {name}", "--out", page]
        commands.run(command, grpo, f"report-{run.name}", "drawing")
    finally:
        commands.stop()
    found, sizes, summary = measure(run), resolutions(run), page.with_suffix(".json")
    content = {"editor": name, "seed": seed, "minutes": arguments.minutes} | sizes
    content |= {"measures": found, "versions": versions(REPO)}
    summary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    gain = found["all"]["oracle_edit"]
    console.line("\n".join([
        "", table(found, sizes), "",
        f"Edit score {gain['gain']:+.3f} (paired standard error {gain['gain_stderr']:.3f}); it is sqrt(followed · kept).",
        f"Numbers: {summary}", f"Report:  {page}",
    ]), indent=0)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Entry point; see ``paco_toy.drivers.drive`` for the exit status."""
    parser = new_parser("editing.sh", __doc__, "the edits and of RL", minutes=5.0)
    parser.add_argument("--editor", choices=EDITORS, default="flux_kontext")
    parser.add_argument("--out", type=Path, default=REPO / "quickstart" / "out", help="default: quickstart/out")
    arguments = parse_arguments(parser, argv)
    return drive("editing", arguments.out.resolve(), lambda: work(arguments))


if __name__ == "__main__":
    sys.exit(main())
