"""The longer study, run by hand: what RL does over seeds, over resolutions, and under a control reward.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

REPO = Path(__file__).resolve().parent.parent
GRPO = REPO / "PaCo-GRPO"
OUT = REPO / "quickstart" / "out" / "study"
ASSETS = REPO / "assets"
LABEL, PORT = "paco-study", "8077"
ALIGNMENT = "paco_toy.oracle:oracle_alignment"
MEASURES = (
    "oracle_consistency",
    "consistency_score",
    "oracle_alignment",
    "oracle_view",
    "oracle_distinct",
    "oracle_valid",
)


@dataclass(frozen=True)
class StudyRun:
    """One training run of the study."""

    name: str
    seed: int
    resolution: int = 64
    reward: str | None = None  # the only training reward, by import path; None: the configuration's, the judge

    @property
    def folder(self) -> Path:
        return OUT / self.name


RUNS = (
    StudyRun("64px-seed0", 0),
    StudyRun("64px-seed1", 1),
    StudyRun("64px-seed2", 2),
    StudyRun("alignment-seed0", 0, 64, ALIGNMENT),
    StudyRun("32px-seed0", 0, 32),
    StudyRun("128px-seed0", 0, 128),
)


def _command(run: StudyRun, minutes: float, every: int) -> list[str]:
    command = [
        "bash", "scripts/single_node/train_flux.sh", "toy_t2is", f"--config.seed={run.seed}",
        f"--config.save_dir={os.path.relpath(OUT, GRPO)}", f"--config.run_name={run.name}", "--config.resume_from=latest",
        f"--config.train.resolution={run.resolution}", f"--config.max_train_minutes={minutes}", "--config.num_epochs=100000",
        f"--config.eval_freq={every}", f"--config.test.seed={1000 + run.seed}", "--config.num_threads=1",
    ]  # fmt: skip
    kwargs = f"{{'consistency_score': {{'base_url': 'http://127.0.0.1:{PORT}', 'model': 'PaCo-Reward-Toy'}}}}"
    command.append(f"--config.test.reward_fn_kwargs={kwargs}")
    if run.reward is None:
        command.append(f"--config.train.reward_fn_kwargs={kwargs}")
    else:
        command += ["--config.train.reward_fn={'" + run.reward + "': 1.0}", "--config.train.reward_fn_kwargs={}"]
    return command


def _server(judge: Path, script: str) -> None:
    served = {
        "VLLM_MODEL_PATHS": str(judge),
        "VLLM_MODEL_NAMES": "PaCo-Reward-Toy",
        "VLLM_PORT": PORT,
        "VLLM_LABEL": LABEL,
    }
    subprocess.run(["bash", f"vllm_server/{script}"], cwd=GRPO, env={**os.environ, **served}, check=True)


def train(runs: tuple[StudyRun, ...], judge: Path, minutes: float, every: int, jobs: int) -> None:
    """Runs `jobs` trainings at a time, one thread each, beside one server; a finished run is not run again."""
    OUT.mkdir(parents=True, exist_ok=True)
    waiting = [run for run in runs if not (run.folder / "study.done").exists()]
    running: dict[str, tuple[StudyRun, subprocess.Popen]] = {}
    if not waiting:
        return
    _server(judge, "launch.sh")
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                log = (OUT / f"{run.name}.log").open("w")
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
                command = _command(run, minutes, every)
                print(f"started {run.name} ({len(waiting)} waiting); log: {log.name}", flush=True)
                process = subprocess.Popen(command, cwd=GRPO, env=environment, stdout=log, stderr=subprocess.STDOUT)
                running[run.name] = (run, process)
            for name, (run, process) in list(running.items()):
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    continue
                del running[name]
                if process.returncode != 0:
                    raise SystemExit(
                        f"{name} failed; the end of its log ({OUT / name}.log):\n{_tail(OUT / f'{name}.log')}"
                    )
                (run.folder / "study.done").touch()
                print(f"finished {name}", flush=True)
    finally:
        for _, process in running.values():
            process.terminate()
        _server(judge, "stop.sh")


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def evaluations(run: StudyRun) -> Iterator[dict]:
    """The evaluation rows of a run's metrics.jsonl, in order."""
    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["phase"] == "eval":
            yield row


def _last_samples(run: StudyRun, epochs: int = 5) -> dict[str, float]:
    """Mean scores of the images of the last epochs, at the training resolution."""
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["phase"] == "train"][-epochs:]
    keys = {f"reward/{name}_mean": name for name in MEASURES}
    return {name: float(np.mean([row[key] for row in rows])) for key, name in keys.items() if key in rows[-1]}


def _images(run: StudyRun, epoch: int) -> list[dict]:
    path = run.folder / "eval" / f"epoch_{epoch:04d}" / "eval_data.jsonl"
    return [json.loads(line)["rewards"] for line in path.read_text().splitlines()]


def at_equal_alignment(before: list[dict], after: list[dict]) -> tuple[float, float]:
    """Mean consistency before and after among images with equally many panels that agree with the prompt.

    Strata are the shares of agreeing panels short of all four (all four right is consistent by definition); they are weighted
    by the smaller of the two counts.
    """
    strata = []
    for level in (0.0, 0.25, 0.5, 0.75):
        pair = [
            [r["oracle_consistency"] for r in rows if abs(r["oracle_alignment"] - level) < 1e-6]
            for rows in (before, after)
        ]
        if all(pair):
            strata.append((min(len(p) for p in pair), np.mean(pair[0]), np.mean(pair[1])))
    if not strata:
        return float("nan"), float("nan")
    weights, first, second = np.array(strata).T
    return float(np.average(first, weights=weights)), float(np.average(second, weights=weights))


def summarise(run: StudyRun) -> dict:
    """First and last evaluation of a run."""
    rows = list(evaluations(run))
    first, last = rows[0], rows[-1]
    result: dict = {
        "run": run.name,
        "resolution": run.resolution,
        "epochs": last["epoch"],
        "minutes": last["train_time"] / 60,
    }
    for name in MEASURES:
        key = f"eval/{name}_mean"
        if key in first:
            result[name] = {"before": first[key], "after": last[key], "stderr": last[f"eval/{name}_stderr"]}
    result["last_samples"] = _last_samples(run)
    before, after = (_images(run, row["epoch"]) for row in (first, last))
    result["at_equal_alignment"] = dict(zip(("before", "after"), at_equal_alignment(before, after)))
    return result


def table(runs: tuple[StudyRun, ...]) -> str:
    """Markdown table of all finished runs; also written to study.json."""
    results = [summarise(run) for run in runs if (run.folder / "study.done").exists()]
    lines = [
        "| run | epochs (min) | oracle consistency | gain | judge | alignment | view | distinct | valid | consistency at equal alignment |",
        "|---" * 10 + "|",
    ]
    for r in results:
        o = r["oracle_consistency"]
        cells = [f"{r[n]['before']:.2f} → {r[n]['after']:.2f}" if n in r else "" for n in MEASURES[1:]]
        equal = r["at_equal_alignment"]
        lines.append(
            f"| {r['run']} | {r['epochs']} ({r['minutes']:.0f}) | {o['before']:.3f} → {o['after']:.3f} ± {o['stderr']:.3f} | {o['after'] - o['before']:+.3f} | "
            + " | ".join(cells)
            + f" | {equal['before']:.2f} → {equal['after']:.2f} |"
        )
    (REPO / "quickstart" / "study.json").write_text(json.dumps(results, indent=2) + "\n")
    text = "\n".join(lines) + "\n"
    (REPO / "quickstart" / "study.md").write_text(text)
    return text


COLOURS = {"64px-seed0": "#1f5fbf", "64px-seed1": "#4f8fdf", "64px-seed2": "#8fbcef", "32px-seed0": "#2f9e6e", "128px-seed0": "#b3541e", "alignment-seed0": "#8a8a8a"}  # fmt: skip


def _curve(axis, run: StudyRun, measure: str, across: str) -> None:
    rows = list(evaluations(run))
    x = [row["epoch"] if across == "epochs" else row["train_time"] / 60 for row in rows]
    y = np.array([row[f"eval/{measure}_mean"] for row in rows])
    error = np.array([row[f"eval/{measure}_stderr"] for row in rows])
    axis.plot(x, y, color=COLOURS[run.name], label=run.name, linewidth=1.8)
    axis.fill_between(x, y - error, y + error, color=COLOURS[run.name], alpha=0.15, linewidth=0)


def figures(runs: tuple[StudyRun, ...]) -> None:
    """assets/study.png (seeds and control) and assets/resolution_study.png (32, 64, 128 px)."""
    done = [run for run in runs if (run.folder / "study.done").exists()]
    titles = {"oracle_consistency": "oracle consistency at 128 px", "consistency_score": "judge's score at 128 px"}
    seeds = [r for r in done if r.resolution == 64]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharex=True, layout="constrained")
    for axis, (measure, title) in zip(axes, titles.items()):
        for run in seeds:
            _curve(axis, run, measure, "minutes")
        axis.set(title=title, xlabel="minutes of training (one thread)")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(ASSETS / "study.png", dpi=110)
    resolutions = [r for r in done if r.name in ("32px-seed0", "64px-seed0", "128px-seed0")]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.6), layout="constrained", sharey="row")
    for row, (measure, title) in zip(axes, titles.items()):
        for axis, across in zip(row, ("epochs", "minutes")):
            for run in resolutions:
                _curve(axis, run, measure, across)
            axis.set(ylabel=title, xlabel="epochs" if across == "epochs" else "minutes of training (one thread)")
            axis.grid(alpha=0.25)
    axes[0, 0].legend(frameon=False, fontsize=8, title="trained at")
    figure.savefig(ASSETS / "resolution_study.png", dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=14, help="training minutes of each run, evaluations not counted"
    )
    parser.add_argument("--every", type=int, default=20, help="epochs between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--judge", type=Path, default=REPO / "quickstart" / "out" / "judge")
    parser.add_argument("--runs", nargs="*", help="names of the runs to do; default all")
    parser.add_argument("--only", choices=["table"], help="no training")
    arguments = parser.parse_args()
    unknown = set(arguments.runs or []) - {run.name for run in RUNS}
    if unknown:
        parser.error(f"unknown runs {sorted(unknown)}; there are {[run.name for run in RUNS]}")
    chosen = tuple(run for run in RUNS if not arguments.runs or run.name in arguments.runs)
    if arguments.only != "table":
        if not (arguments.judge / "config.json").exists():
            sys.exit(f"no judge in {arguments.judge}: run quickstart/run.sh first, or name one with --judge")
        train(chosen, arguments.judge, arguments.minutes, arguments.every, arguments.jobs)
    print(table(RUNS))
    figures(RUNS)


if __name__ == "__main__":
    main()
