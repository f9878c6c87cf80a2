"""The longer study, run by hand: what RL does to agreement, choice and consistency, over seeds and against controls.

    .venv/bin/python quickstart/study.py                     # all runs, two at a time (after quickstart/run.sh, whose judge it serves)
    .venv/bin/python quickstart/study.py --only table        # the table and the figure again from finished runs

Runs (each `train_flux.sh toy_t2is` with overrides and a fixed number of epochs, evaluated at 128 px; started again, an
unfinished one continues and a finished one is left alone):
    judge        the quickstart's reward: the judge's consistency, and variety over the images of a prompt
    plain        the judge's consistency alone: does the choice collapse?
    alignment    the control: the oracle's share of panels that show what is named; no judge
    oracle       the ceiling: consistency and variety, both by the oracle
    32px         judge, trained at 32 px
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from paco_toy.processes import failure
from paco_toy.stages import SERVED_NAME
from paco_toy.summary import MEASURES, Evaluation, policy_measures, read_rows

REPO = Path(__file__).resolve().parent.parent
GRPO = REPO / "PaCo-GRPO"
OUT = REPO / "quickstart" / "out" / "study"
ASSETS = REPO / "assets"
LABEL, PORT = "paco-study", "8077"
SERVED = {"base_url": f"http://127.0.0.1:{PORT}", "model": SERVED_NAME}
ORACLE = "paco_toy.oracle:oracle_"


@dataclass(frozen=True)
class Kind:
    """What the runs of one name have in common.

    Attributes:
        rewards: Of training.
    """

    name: str
    color: str
    rewards: dict[str, float]
    resolution: int = 64
    seeds: Sequence[int] = field(default=(0, 1, 2))


KINDS = (
    Kind("judge", "#1f5fbf", {"consistency_score": 1.0, "between_images": 8.0}),
    Kind("plain", "#b3541e", {"consistency_score": 1.0}),
    Kind("alignment", "#8a8a8a", {f"{ORACLE}alignment": 1.0}),
    Kind("oracle", "#2f9e6e", {f"{ORACLE}consistency": 1.0, f"{ORACLE}between_images": 8.0}),
    Kind("32px", "#8a4fbf", {"consistency_score": 1.0, "between_images": 8.0}, resolution=32, seeds=(0,)),
)


@dataclass(frozen=True)
class StudyRun:
    """One training run of the study."""

    kind: Kind
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind.name}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return OUT / self.name

    @property
    def is_done(self) -> bool:
        return (self.folder / "study.done").exists()


RUNS = tuple(StudyRun(kind, seed) for kind in KINDS for seed in kind.seeds)


def _train(run: StudyRun, epochs: int, every: int) -> None:
    path = OUT / f"{run.name}.log"
    print(f"started {run.name}; log: {path}", flush=True)
    judged = {name: SERVED for name in run.kind.rewards if not name.startswith(ORACLE)}
    options = {
        "seed": run.seed, "save_dir": os.path.relpath(OUT, GRPO), "run_name": run.name, "resume_from": "latest",
        "num_epochs": epochs, "max_train_minutes": 600, "eval_freq": every, "num_threads": 1,
        "train.resolution": run.kind.resolution, "train.reward_fn": run.kind.rewards, "train.reward_fn_kwargs": judged,
        "test.seed": 1000 + run.seed, "test.num_images": 256, "test.reward_fn_kwargs": {"consistency_score": SERVED},
    }  # fmt: skip
    command = ["bash", "scripts/single_node/train_flux.sh", "toy_t2is", *(f"--config.{k}={v}" for k, v in options.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
    with path.open("w") as log:
        done = subprocess.run(command, cwd=GRPO, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise SystemExit(failure(run.name, done.returncode, path.read_text(errors="replace"), path))
    (run.folder / "study.done").touch()
    print(f"finished {run.name}", flush=True)


def train(runs: Sequence[StudyRun], judge: Path, epochs: int, every: int, jobs: int) -> None:
    """Runs ``jobs`` trainings at a time, one thread each, and one server; a finished run is not run again."""
    waiting = [run for run in runs if not run.is_done]
    if not waiting:
        return
    OUT.mkdir(parents=True, exist_ok=True)
    served = {"VLLM_MODEL_PATHS": str(judge), "VLLM_MODEL_NAMES": SERVED_NAME, "VLLM_PORT": PORT, "VLLM_LABEL": LABEL}
    subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env={**os.environ, **served}, check=True)
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(_train, run, epochs, every) for run in waiting]):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env={**os.environ, **served}, check=True)


def summarize(run: StudyRun) -> dict:
    """The measures of a finished run, and its minutes of training."""
    minutes = read_rows(run.folder / "metrics.jsonl")[-1]["train_time"] / 60
    return {"run": run.name, "kind": run.kind.name, "seed": run.seed, "minutes": minutes} | policy_measures(run.folder)


def table(results: Sequence[dict]) -> str:
    """Markdown: each run, and the mean of each kind with more than one seed."""
    head = ("run", "epochs (min)", *MEASURES)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind in KINDS:
        of_kind = [result for result in results if result["kind"] == kind.name]
        for r in of_kind:
            cells = [r["run"], f"{r['epochs']} ({r['minutes']:.0f})"]
            for name in MEASURES:
                change = r["change"][name]
                cells.append(f"{r['before'][name]:.2f} → {r['after'][name]:.2f} ({change['mean']:+.3f} ± {change['stderr']:.3f})")
            lines.append(f"| {' | '.join(cells)} |")
        if len(of_kind) > 1:
            # Seeds are independent: the standard error of their mean follows from each one's own.
            cells = [f"**{kind.name}, mean of {len(of_kind)}**", ""]
            for name in MEASURES:
                changes = [r["change"][name] for r in of_kind]
                error = float(np.sqrt(np.sum([c["stderr"] ** 2 for c in changes]))) / len(changes)
                cells.append(f"**{np.mean([c['mean'] for c in changes]):+.3f} ± {error:.3f}**")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figure(runs: Sequence[StudyRun]) -> None:
    """assets/study.png: agreement, choice and full prompts' consistency against epochs, a line for each run."""
    shown = {name: MEASURES[name] for name in ("agreement", "choice", "consistency")}
    drawn, axes = plt.subplots(1, len(shown), figsize=(12, 3.8), sharex=True, layout="constrained")
    for run in runs:
        folders = sorted(path.parent for path in (run.folder / "eval").glob("epoch_*/eval_data.jsonl"))
        means = [Evaluation.of(folder).means() for folder in folders]
        epochs = [int(folder.name.removeprefix("epoch_")) for folder in folders]
        for axis, name in zip(axes, shown, strict=True):
            first = run.seed == run.kind.seeds[0]
            axis.plot(epochs, [m[name] for m in means], color=run.kind.color, linewidth=1.6, label=run.kind.name if first else None)
    for axis, title in zip(axes, shown.values(), strict=True):
        axis.set_title(f"{title}, 128 px", fontsize=10)
        axis.set_xlabel("epochs")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    drawn.savefig(ASSETS / "study.png", dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of each run")
    parser.add_argument("--every", type=int, default=20, help="epochs between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--judge", type=Path, default=REPO / "quickstart" / "out" / "judge")
    parser.add_argument("--runs", nargs="*", choices=[run.name for run in RUNS], help="runs to do; default all")
    parser.add_argument("--only", choices=["table"], help="no training")
    arguments = parser.parse_args()
    chosen = tuple(run for run in RUNS if not arguments.runs or run.name in arguments.runs)
    if arguments.only != "table":
        if not (arguments.judge / "config.json").exists():
            sys.exit(f"no judge in {arguments.judge}: run quickstart/run.sh first, or name one with --judge")
        train(chosen, arguments.judge, arguments.epochs, arguments.every, arguments.jobs)
    done = [run for run in RUNS if run.is_done]
    results = [summarize(run) for run in done]
    text = table(results)
    (REPO / "quickstart" / "study.json").write_text(json.dumps(results, indent=2) + "\n")
    (REPO / "quickstart" / "study.md").write_text(text)
    print(text)
    figure(done)


if __name__ == "__main__":
    main()
