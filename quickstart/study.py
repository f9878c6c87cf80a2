"""The longer study, run by hand: the effect of RL over seeds, over resolutions, and under a control reward.

    .venv/bin/python quickstart/study.py                     # all runs, two at a time (after quickstart/run.sh, whose judge it serves)
    .venv/bin/python quickstart/study.py --only table        # the table and the figures again from finished runs

Runs (each `train_flux.sh toy_t2is` with overrides, evaluated at 128 px on prompts and seeds that no setting was chosen on):
    seed 0, 1, 2 at 64 px                  the claim: consistency rises at 128 px, trained at 64 px
    32 px and 128 px, seed 0               the resolution study: the same minutes, other training resolutions
    alignment, seed 0                      the control: the only reward is the oracle's prompt alignment, no judge
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from paco_toy.processes import failure
from paco_toy.stages import SERVED_NAME
from paco_toy.summary import read_rows

REPO = Path(__file__).resolve().parent.parent
GRPO = REPO / "PaCo-GRPO"
OUT = REPO / "quickstart" / "out" / "study"
ASSETS = REPO / "assets"
LABEL, PORT = "paco-study", "8077"
ALIGNMENT = "paco_toy.oracle:oracle_alignment"
MEASURES = (
    "oracle_consistency", "consistency_score", "oracle_alignment", "oracle_view", "oracle_distinct", "oracle_valid",
)  # fmt: skip


@dataclass(frozen=True)
class StudyRun:
    """One training run of the study."""

    name: str
    color: str
    seed: int = 0
    resolution: int = 64
    reward: str | None = None  # the only training reward, by import path; None: the configuration's, the judge

    @property
    def folder(self) -> Path:
        return OUT / self.name

    @property
    def is_done(self) -> bool:
        return (self.folder / "study.done").exists()

    def rows(self, phase: str) -> list[dict]:
        """The rows of metrics.jsonl of one phase, in order."""
        return [row for row in read_rows(self.folder / "metrics.jsonl") if row["phase"] == phase]


RUNS = (
    StudyRun("64px-seed0", "#1f5fbf"),
    StudyRun("64px-seed1", "#4f8fdf", seed=1),
    StudyRun("64px-seed2", "#8fbcef", seed=2),
    StudyRun("alignment-seed0", "#8a8a8a", reward=ALIGNMENT),
    StudyRun("32px-seed0", "#2f9e6e", resolution=32),
    StudyRun("128px-seed0", "#b3541e", resolution=128),
)


def _train(run: StudyRun, minutes: float, every: int) -> None:
    path = OUT / f"{run.name}.log"
    print(f"started {run.name}; log: {path}", flush=True)
    kwargs = f"{{'consistency_score': {{'base_url': 'http://127.0.0.1:{PORT}', 'model': '{SERVED_NAME}'}}}}"
    command = [
        "bash", "scripts/single_node/train_flux.sh", "toy_t2is", f"--config.seed={run.seed}",
        f"--config.save_dir={os.path.relpath(OUT, GRPO)}", f"--config.run_name={run.name}", "--config.resume_from=latest",
        f"--config.train.resolution={run.resolution}", f"--config.max_train_minutes={minutes}", "--config.num_epochs=100000",
        f"--config.eval_freq={every}", f"--config.test.seed={1000 + run.seed}", "--config.num_threads=1",
        f"--config.test.reward_fn_kwargs={kwargs}", f"--config.train.reward_fn_kwargs={'{}' if run.reward else kwargs}",
    ]  # fmt: skip
    if run.reward:
        command.append("--config.train.reward_fn={'" + run.reward + "': 1.0}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
    with path.open("w") as log:
        done = subprocess.run(command, cwd=GRPO, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise SystemExit(failure(run.name, done.returncode, path.read_text(errors="replace"), path))
    (run.folder / "study.done").touch()
    print(f"finished {run.name}", flush=True)


def train(runs: tuple[StudyRun, ...], judge: Path, minutes: float, every: int, jobs: int) -> None:
    """Runs ``jobs`` trainings at a time, one thread each, and one server; a finished run is not run again."""
    waiting = [run for run in runs if not run.is_done]
    if not waiting:
        return
    OUT.mkdir(parents=True, exist_ok=True)
    served = {"VLLM_MODEL_PATHS": str(judge), "VLLM_MODEL_NAMES": SERVED_NAME, "VLLM_PORT": PORT, "VLLM_LABEL": LABEL}
    subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env={**os.environ, **served}, check=True)
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(_train, run, minutes, every) for run in waiting]):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env={**os.environ, **served}, check=True)


def at_equal_alignment(before: list[dict], after: list[dict]) -> tuple[float, float]:
    """Mean consistency before and after among images with equally many panels that agree with the prompt.

    Strata are the shares of agreeing panels short of all four (all four right is consistent by definition); they are weighted
    by the smaller of the two counts.
    """
    strata = []
    for level in (0.0, 0.25, 0.5, 0.75):
        first, second = (
            [r["oracle_consistency"] for r in rows if abs(r["oracle_alignment"] - level) < 1e-6] for rows in (before, after)
        )
        if first and second:
            strata.append((min(len(first), len(second)), np.mean(first), np.mean(second)))
    if not strata:
        return float("nan"), float("nan")
    weights, first, second = np.array(strata).T
    return float(np.average(first, weights=weights)), float(np.average(second, weights=weights))


def summarize(run: StudyRun) -> dict:
    """First and last evaluation of a run, and the mean scores of the last five epochs' samples."""
    evaluations, epochs = run.rows("eval"), run.rows("train")[-5:]
    first, last = evaluations[0], evaluations[-1]
    result: dict = {"run": run.name, "resolution": run.resolution}
    result |= {"epochs": last["epoch"], "minutes": last["train_time"] / 60}
    for name in MEASURES:
        key = f"eval/{name}_mean"
        if key in first:
            result[name] = {"before": first[key], "after": last[key], "stderr": last[f"eval/{name}_stderr"]}
    keys = {name: f"reward/{name}_mean" for name in MEASURES if f"reward/{name}_mean" in epochs[-1]}
    result["last_samples"] = {name: float(np.mean([row[key] for row in epochs])) for name, key in keys.items()}
    files = (run.folder / "eval" / f"epoch_{row['epoch']:04d}" / "eval_data.jsonl" for row in (first, last))
    images = [[image["rewards"] for image in read_rows(file)] for file in files]
    result["at_equal_alignment"] = dict(zip(("before", "after"), at_equal_alignment(*images)))
    return result


def table(runs: tuple[StudyRun, ...]) -> str:
    """Markdown table of all finished runs, also written to study.md; all numbers go to study.json."""
    results = [summarize(run) for run in runs if run.is_done]
    head = ("run", "epochs (min)", "oracle consistency", "gain", "judge", "alignment", "view", "distinct", "valid",
            "consistency at equal alignment")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in results:
        o = r["oracle_consistency"]
        cells = [r["run"], f"{r['epochs']} ({r['minutes']:.0f})"]
        cells += [f"{o['before']:.3f} → {o['after']:.3f} ± {o['stderr']:.3f}", f"{o['after'] - o['before']:+.3f}"]
        for name in (*MEASURES[1:], "at_equal_alignment"):
            cells.append(f"{r[name]['before']:.2f} → {r[name]['after']:.2f}" if name in r else "")
        lines.append(f"| {' | '.join(cells)} |")
    (REPO / "quickstart" / "study.json").write_text(json.dumps(results, indent=2) + "\n")
    text = "\n".join(lines) + "\n"
    (REPO / "quickstart" / "study.md").write_text(text)
    return text


TITLES = {"oracle_consistency": "oracle consistency at 128 px", "consistency_score": "judge's score at 128 px"}
AXES = {"epochs": "epochs", "minutes": "minutes of training (one thread)"}


def _curves(axis, runs: list[StudyRun], measure: str, across: str) -> None:
    for run in runs:
        rows = run.rows("eval")
        x = [row["epoch"] if across == "epochs" else row["train_time"] / 60 for row in rows]
        y = np.array([row[f"eval/{measure}_mean"] for row in rows])
        error = np.array([row[f"eval/{measure}_stderr"] for row in rows])
        axis.plot(x, y, color=run.color, label=run.name, linewidth=1.8)
        axis.fill_between(x, y - error, y + error, color=run.color, alpha=0.15, linewidth=0)
    axis.set_xlabel(AXES[across])
    axis.grid(alpha=0.25)


def figures(runs: tuple[StudyRun, ...]) -> None:
    """assets/study.png (seeds and control) and assets/resolution_study.png (32, 64, 128 px)."""
    done = [run for run in runs if run.is_done]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharex=True, layout="constrained")
    for axis, (measure, title) in zip(axes, TITLES.items()):
        _curves(axis, [run for run in done if run.resolution == 64], measure, "minutes")
        axis.set_title(title)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(ASSETS / "study.png", dpi=110)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.6), layout="constrained", sharey="row")
    for row, (measure, title) in zip(axes, TITLES.items()):
        for axis, across in zip(row, AXES):
            _curves(axis, [run for run in done if run.seed == 0 and run.reward is None], measure, across)
            axis.set_ylabel(title)
    axes[0, 0].legend(frameon=False, fontsize=8, title="trained at")
    figure.savefig(ASSETS / "resolution_study.png", dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14, help="training minutes of each run, without evaluations")
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
        train(chosen, arguments.judge, arguments.minutes, arguments.every, arguments.jobs)
    print(table(RUNS))
    figures(RUNS)


if __name__ == "__main__":
    main()
