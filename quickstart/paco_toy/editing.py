"""RL of a toy editor on a CPU: the driver behind `bash quickstart/editing.sh`.

The editing task is rendered ("make the star blue" on a 2x2 scene), PaCo-GRPO trains an editor on the oracle's score by the
command that a user with GPUs types, and a report shows reference image, before and after. There is no judge in this: the
toy judge compares two panels and cannot read instructions. Everything goes to quickstart/out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paco_toy.console import Console, TimeLeft
from paco_toy.drivers import end_as_by_ctrl_c, new_parser, only_one, parse_arguments
from paco_toy.processes import Commands, QuickstartError
from paco_toy.quickstart import REPO
from paco_toy.stages import EpochProgress, cpu_processes, resolutions
from paco_toy.summary import read_rows, versions


@dataclass(frozen=True)
class Editor:
    """How an editor is trained: the script in PaCo-GRPO/scripts/single_node and its configuration."""

    script: str
    config: str


EDITORS = {
    "flux_kontext": Editor("train_flux_kontext.sh", "toy_kontext"),
    "qwen_image_edit": Editor("train_qwenimage_edit.sh", "toy_qwen_edit"),
}
MEASURES = {
    "oracle_edit": "edit score, the reward",
    "oracle_followed": "instruction followed",
    "oracle_kept": "what is not mentioned is kept",
}
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


def paired_gain(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Mean of after − before, (n,) each, and its standard error over the n edits: the same edits and noise in both."""
    difference = after - before
    return float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(len(difference)))


def measure(run: Path) -> dict[str, Any]:
    """First and last evaluation of a run: {"all": …, "<category>": …} -> measure -> before, after, errors and gain.

    Raises:
        QuickstartError: The run has no two evaluations of the same edits.
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
            gain, error = paired_gain(*pair)
            errors = [float(x.std(ddof=1) / math.sqrt(len(x))) for x in pair]
            found[group][name] = {
                "before": float(pair[0].mean()), "before_stderr": errors[0], "after": float(pair[1].mean()),
                "after_stderr": errors[1], "gain": gain, "gain_stderr": error,
            }  # fmt: skip
    return found


def table(found: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """The small table at the end."""
    head = f"held-out edits at {sizes['test_resolution']} px (trained at {sizes['train_resolution']} px)"
    rows = [(head, "before", "after", "change")]
    for group, values in found.items():
        rows.append(("all" if group == "all" else f"result is a {group}", f"({values['num_images']} edits)", "", ""))
        for name, words in MEASURES.items():
            m = values[name]
            cells = [f"{m[when]:.3f} ±{m[f'{when}_stderr']:.3f}" for when in ("before", "after")]
            rows.append((f"  {words}", *cells, f"{m['gain']:+.3f} ±{m['gain_stderr']:.3f}"))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{row[0]:<{width}}  {row[1]:<13}  {row[2]:<13}  {row[3]}".rstrip() for row in rows)


def train(
    editor: Editor, run: Path, seed: int, minutes: float, overrides: Sequence[str], python: str, commands: Commands
) -> None:
    """Render the task and run RL, by the commands of the guides."""
    edits = run.parents[1] / "world" / f"edits_seed{seed}"
    if not (edits / "test_metadata.jsonl").is_file():  # the last file to be written
        command = [python, "-m", "paco_toy.edits", "--seed", seed, "--out", edits]
        commands.run(command, REPO, f"edits-{seed}", "rendering", span=(0.0, 0.0))
    grpo = REPO / "PaCo-GRPO"
    command = ["bash", f"scripts/single_node/{editor.script}", editor.config, f"--config.seed={seed}",
               f"--config.dataset={os.path.relpath(edits, grpo)}", f"--config.save_dir={os.path.relpath(run.parent, grpo)}",
               f"--config.run_name={run.name}", "--config.resume_from=latest", f"--config.max_train_minutes={minutes}"]  # fmt: skip
    commands.run([*command, *overrides], grpo, run.name, "training", env={"PYTHON": python, **cpu_processes()},
                 progress=EpochProgress(run, minutes, "edit score"))  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = new_parser("editing.sh", __doc__, "the edits and of RL")
    parser.add_argument("--editor", choices=EDITORS, default="flux_kontext")
    parser.add_argument("--out", type=Path, default=REPO / "quickstart" / "out", help="default: quickstart/out")
    return parse_arguments(parser, argv)


def work(arguments: argparse.Namespace) -> None:
    """All of it.

    Raises:
        QuickstartError: Something needed is missing, or a command failed.
    """
    editor, out = EDITORS[arguments.editor], arguments.out.resolve()
    if not list((REPO / "quickstart" / "models" / arguments.editor).rglob("*.safetensors")):
        raise QuickstartError(
            f"the toy base quickstart/models/{arguments.editor} is not there. Restore it (git checkout -- quickstart/models) "
            f"or build it (python -m paco_toy.build_editors --editor {arguments.editor} --out quickstart/models/{arguments.editor})."
        )
    run = out / "runs" / f"{editor.config}_seed{arguments.seed}"
    if arguments.fresh:
        shutil.rmtree(run, ignore_errors=True)
    python = os.environ.get("PYTHON") or sys.executable
    console = Console(TimeLeft(STAGES), len(STAGES))
    commands = Commands(out / "logs", console.progress)
    console.stage_name = "rl"
    try:
        train(editor, run, arguments.seed, arguments.minutes, arguments.overrides, python, commands)
        page = out / f"editing_{arguments.editor}.html"
        title = f"RL of a toy editor: {arguments.editor}"
        commands.run([python, "-m", "paco_grpo.report", run, "--title", title, "--out", page], REPO / "PaCo-GRPO",
                     f"report-{run.name}", "drawing")  # fmt: skip
    finally:
        commands.stop()
    found, sizes = measure(run), resolutions(run)
    summary = page.with_suffix(".json")
    content = {"editor": arguments.editor, "seed": arguments.seed, "minutes": arguments.minutes, **sizes, "measures": found,
               "versions": versions(REPO)}  # fmt: skip
    summary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    gain = found["all"]["oracle_edit"]
    console.line("\n".join([
        "", table(found, sizes), "",
        f"Edit score {gain['gain']:+.3f} (paired standard error {gain['gain_stderr']:.3f}); it is sqrt(followed · kept).",
        f"Numbers: {summary}", f"Report:  {page}",
    ]), indent=0)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Entry point; 0 when everything ran, 1 with one message when not, 130 after Ctrl-C."""
    arguments = parse(argv)
    end_as_by_ctrl_c()
    try:
        with only_one(arguments.out.resolve()):
            work(arguments)
    except QuickstartError as error:
        print(f"\nediting: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nediting: interrupted. Run it again to go on from the last checkpoint.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
