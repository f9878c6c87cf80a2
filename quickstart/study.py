"""Trains the toy generator with other options and seeds; results.csv keeps what came out.

    study.py rewards                           # which reward keeps images different
    study.py objectives --runs nft awm         # objectives with the quickstart's reward
    study.py resolution aggregation            # the two claims of docs/method.md
    study.py rewards --table                   # trains nothing: the table of finished runs

It needs quickstart/out/judge, which run.sh trains. A run that results.csv has for this commit and
this judge is not repeated, and a stopped run continues. The columns:

- ``judge``: the start of the SHA-256 of its weights. Runs with different judges are not averaged.
- ``oracle_w``, ``oracle_b``, ``oracle_w_minus_b``: docs/rewards.md, "Agreement beyond other
  images", read by the oracle on open prompts. ``judge_`` and ``other_`` are the same numbers by the
  judge and by a judge with another base, wording and training pairs. ``…_kappa`` =
  (w − b) / (1 − b) is what rows until November 2026 have as well.
- ``consistency``, ``agreement`` and the other measures of paco_toy/summary.py, ``_before`` and
  ``_after`` training. A run may have further rows, for evaluations on the way.
- ``minutes``: of the training, on a machine that may be shared. ``cpu_minutes``: of the trainer's
  processes, evaluations included, without the judge.
- ``teraflops``: of the transformer in all epochs so far, without evaluations (until e793f4b1).
- ``warnings``: signs of collapse (docs/recovery.md), each with the epoch of its first warning.

The quickstart's settings were chosen on seeds 0 to 9. Rows of the study ``hacks`` are runs with
planted rewards, which chose the signs of collapse (commit e2bd40d); ``quickstart`` are whole
quickstarts, before commit e89da58 of a toy world whose prompts also left the shape open; ``gardo``
and ``entropy`` are rewards that left with e793f4b1.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from paco_toy.summary import MEASURES, commit, judge_id, policy_measures, scores_of
from paco_toy.world import read_jsonl

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent / "PaCo-GRPO"
RESULTS = HERE / "results.csv"
OUT = HERE / "out" / "study"
KEY = ["study", "run", "seed", "commit", "judge"]

# --- what is trained ------------------------------------------------------------------------------

SERVED = {"port": 8077, "model": "PaCo-Reward-Toy"}
JUDGED = ("consistency_score", "between_images")
ORACLE = "paco_toy.oracle:oracle_"
# With weight 0, between_images is monitored: w and b in every epoch, and their warning.
CONSISTENCY = {"train.reward_fn": {"consistency_score": 1.0, "between_images": 0.0}}
VARIETY = {"train.reward_fn": {"consistency_score": 1.0, "between_images": 8.0}}
# A control: no judge of consistency, but the share of panels that show what is named.
NAMING_VARIETY = {"train.reward_fn": {f"{ORACLE}alignment": 1.0, "between_images": 8.0}}
LONG = {"num_epochs": 80, "eval_freq": 20}
# With one optimizer step an epoch, the ratio is 1 and these objectives are the same.
RATIO = {"train.gradient_step_per_epoch": 2}
# Without noise, images of one initial noise would be equal.
FORWARD = {
    "sample.noise_level": 0.0,
    "sample.same_latent": False,
    "sample.latents_per_prompt": 1,
    "train.num_sigmas": 3,
}
# The oracle alone evaluates, so that the judge has fewer questions.
BY_ORACLE = {
    "test.reward_fn": {f"{ORACLE}consistency": 1.0},
    "test.reward_fn_kwargs": {},
    "test.num_images": 64,
}
# Alignment is between 0 and 1; darkness varies twelve times as much.
LOUD_AND_QUIET = {
    "train.reward_fn": {f"{ORACLE}alignment": 1.0, "paco_toy.darkness:darkness": 1.0},
    "train.num_sigmas": 2,
    "test.reward_fn": {f"{ORACLE}alignment": 1.0, "paco_toy.darkness:darkness": 1.0},
    "test.reward_fn_kwargs": {},
    "test.resolution": 64,
    "num_epochs": 8,
    "eval_freq": 8,
    "save_freq": 0,
}
OBJECTIVES = {
    "ppo": RATIO,
    "guard_grpo": RATIO,
    "flow_dppo": RATIO,
    "nft": FORWARD | {"train.sigma_one": True, "train.beta": 0.02},
    "awm": FORWARD | {"train.beta": 0.02, "train.awm_slow_beta": 0.0},
    "dgpo": FORWARD | {"train.sigma_one": True, "train.sigma_fraction": 0.7, "train.beta": 0.02},
}
# As many CPU minutes as 20 epochs of awm, 5.9; 20 epochs of nft took 6.9.
NFT = OBJECTIVES["nft"] | {"train.loss_type": "nft", "num_epochs": 16, "eval_freq": 16}
AGGREGATIONS = {
    "sum": None,
    "log_tame": "log_tame_aggregate_fn",
    # The log of both rewards in every epoch.
    "log_tame_always": {"name": "log_tame_aggregate_fn", "arguments": {"threshold": 0}},
    "advantage_sum": "weighted_advantage_sum_aggregate_fn",
    "product": "product_aggregate_fn",
}


@dataclass(frozen=True)
class Study:
    """Trainings that start from one configuration."""

    config: str
    runs: dict[str, dict[str, Any]]  # name -> options of the training; ``base`` is not trained
    images_per_prompt: int = 4  # for w and b; 0 = without them
    judged: bool = False  # w and b by the judge, too


STUDIES = {
    "rewards": Study(
        "toy_t2is_awm",
        {
            "base": {},
            "consistency": CONSISTENCY,
            "variety": VARIETY,
            "naming_variety": NAMING_VARIETY,
            "kl_0.1": CONSISTENCY | {"train.beta": 0.1},
            "kl_0.5": CONSISTENCY | {"train.beta": 0.5},
            "consistency_80": CONSISTENCY | LONG,
            "variety_80": VARIETY | LONG,
            "consistency_nft": CONSISTENCY | NFT,
            "variety_nft": VARIETY | NFT,  # the quickstart's training
        },
        images_per_prompt=8,
        judged=True,
    ),
    "objectives": Study(
        "toy_t2is",
        {
            name: VARIETY | BY_ORACLE | {"eval_freq": 10, "train.loss_type": name} | options
            for name, options in OBJECTIVES.items()
        }
        | {"nft_16_epochs": VARIETY | BY_ORACLE | NFT | {"eval_freq": 8}},
    ),
    # Compared with ``awm`` of the objectives, which is the same training at 64 px.
    "resolution": Study(
        "toy_t2is_awm",
        {
            "128px": {
                **VARIETY,
                **BY_ORACLE,
                "train.resolution": 128,
                "train.batch_size": 32,
                "num_epochs": 6,
                "eval_freq": 3,
                "save_freq": 3,
            }
        },
    ),
    "aggregation": Study(
        "toy_t2is_awm",
        {name: LOUD_AND_QUIET | {"train.aggregate_fn": fn} for name, fn in AGGREGATIONS.items()},
        images_per_prompt=0,
    ),
}

# --- one run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training of a study."""

    study: str
    name: str
    seed: int

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return OUT / f"{self.name}-seed{self.seed}"


def training_arguments(run: Run, epochs: int) -> list[str]:
    """Arguments of train_flux.sh."""
    study = STUDIES[run.study]
    run_options = study.runs[run.name]
    judged = [name for name in run_options["train.reward_fn"] if name in JUDGED]
    options = {
        "seed": run.seed,
        "save_dir": os.path.relpath(OUT, GRPO),
        "run_name": run.folder.name,
        "resume_from": "latest",
        "num_epochs": epochs,
        "max_train_minutes": 600,
        "eval_freq": epochs,
        "train.reward_fn_kwargs": dict.fromkeys(judged, SERVED),
        "test.seed": 1000 + run.seed,
        "test.num_images": 96,
        "test.reward_fn_kwargs": {"consistency_score": SERVED},
        **run_options,
    }
    return [study.config, *(f"--config.{name}={value}" for name, value in options.items())]


def agreement_command(run: Run) -> list[str]:
    """Measures w and b of a run's last checkpoint, or of the base model."""
    study = STUDIES[run.study]
    rewards = [f"{ORACLE}consistency", f"{ORACLE}between_images"]
    served = {}
    if study.judged:
        rewards = [*JUDGED, *rewards]
        served = dict.fromkeys(JUDGED, SERVED)
    options = {
        "dataset": "../quickstart/out/world/open_prompts",
        "test.seed": 1000 + run.seed,
        "test.reward_fn": dict.fromkeys(rewards, 1.0),
        "test.reward_fn_kwargs": served,
    }
    command = [sys.executable, "scripts/evaluate.py", "--config", "config/grpo.py:toy_t2is"]
    command += ["--images_per_prompt", str(study.images_per_prompt)]
    command += ["--output", str(run.folder / "agreement")]
    checkpoints = sorted((run.folder / "checkpoints").glob("epoch_*"))
    if checkpoints:
        command += ["--adapter", str(checkpoints[-1])]
    return command + [f"--config.{name}={value}" for name, value in options.items()]


def run_command(command: Sequence[str], log: Path) -> float:
    """Runs it in PaCo-GRPO with one thread; returns the CPU minutes of all its processes."""
    variables = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
    with open(log, "a") as file:
        process = subprocess.Popen(
            command, cwd=GRPO, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return (usage.ru_utime + usage.ru_stime) / 60


def finish(run: Run, epochs: int) -> list[dict[str, Any]]:
    """Trains and evaluates; returns the columns of each evaluation, the trained model's last."""
    log = OUT / f"{run.folder.name}.log"
    print(f"started {run.name}, seed {run.seed}; log: {log}", flush=True)
    row = {}
    earlier = []
    if run.name != "base":
        is_new = not run.folder.exists()
        start = time.monotonic()
        arguments = training_arguments(run, epochs)
        cpu_minutes = run_command(["bash", "scripts/single_node/train_flux.sh", *arguments], log)
        row["minutes"] = (time.monotonic() - start) / 60
        if is_new:
            row["cpu_minutes"] = cpu_minutes
        row["warnings"] = warnings_of(log.read_text(errors="replace"))
        *earlier, last = evaluations_of(run.folder)
        row |= before_and_after(policy_measures(run.folder)) | last
    if STUDIES[run.study].images_per_prompt:
        run_command(agreement_command(run), log)
        row |= agreement_columns(run)
    return [*earlier, row]


# --- what came out --------------------------------------------------------------------------------


def warnings_of(log: str) -> str:
    """Signs of collapse with the epochs of their first warnings: ``health/diversity_vs_first@12``."""
    epochs: dict[str, str] = {}
    for epoch, signal in re.findall(r"after epoch (\d+): .*\((\S+) in metrics.jsonl\)", log):
        epochs.setdefault(signal, epoch)
    return " ".join(f"{signal}@{epoch}" for signal, epoch in epochs.items())


def before_and_after(policy: Mapping[str, Any]) -> dict[str, float]:
    """Columns of ``policy_measures``'s results."""
    columns = {"epochs": policy["epochs"], "images": policy["num_images"]}
    for measure in MEASURES:
        if measure in policy["after"]:
            columns[f"{measure}_before"] = policy["before"][measure]
            columns[f"{measure}_after"] = policy["after"][measure]
    return columns


def evaluations_of(folder: Path) -> list[dict[str, float]]:
    """The columns of every evaluation of a run."""
    evaluations = []
    for path in sorted((folder / "eval").glob("epoch_*/eval_data.jsonl")):
        scores, _ = scores_of(path.parent)
        epoch = int(path.parent.name.removeprefix("epoch_"))
        columns = {"epochs": epoch, "images": len(scores)}
        for measure, mean in scores.mean().dropna().items():
            columns[f"{measure}_after"] = mean
        rewards = pd.DataFrame([row["rewards"] for row in read_jsonl(path)])
        if "darkness" in rewards:
            columns["darkness_after"] = rewards["darkness"].mean()
        evaluations.append(columns)
    return evaluations


def agreement_columns(run: Run) -> dict[str, float]:
    """Columns of ``agreement_command``'s results."""
    results = json.loads((run.folder / "agreement" / "results.json").read_text())
    measured = results["results"]["adapter"]
    prefixes = {"oracle": "oracle_"}
    if STUDIES[run.study].judged:
        prefixes["judge"] = ""
    columns = {}
    for reader, prefix in prefixes.items():
        columns[f"{reader}_w"] = measured[f"{prefix}within"]["mean"]
        columns[f"{reader}_b"] = measured[f"{prefix}between"]["mean"]
        columns[f"{reader}_w_minus_b"] = measured[f"{prefix}within_minus_between"]["mean"]
    return columns


def read_results() -> pd.DataFrame:
    """All rows of results.csv."""
    return pd.read_csv(RESULTS, dtype={"commit": str, "judge": str})


def keep(run: Run, judge: str, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Adds a finished run to results.csv: one row for each evaluation."""
    key = {"study": run.study, "run": run.name, "seed": run.seed}
    key |= {"commit": commit(), "judge": judge}
    rows = pd.DataFrame([key | columns for columns in evaluations])
    results = pd.concat([read_results(), rows])
    results.to_csv(RESULTS, index=False, float_format="%.4f")


def trained(results: pd.DataFrame) -> pd.DataFrame:
    """The last row of each run: what the trained model does. ``diversity`` is 1 − b."""
    last = results.drop_duplicates(KEY, keep="last")
    return last.assign(diversity=1 - last["oracle_b"])


LABELS = {
    "oracle_w": "w",
    "diversity": "diversity 1 − b",
    "oracle_w_minus_b": "w − b",
    "consistency_after": "consistency, full prompts",
    "judge_w_minus_b": "w − b by the judge",
    "other_w_minus_b": "w − b by another judge",
    "alignment_after": "panels show what is named",
    "darkness_after": "darkness, %",
    "cpu_minutes": "CPU minutes",
}


def table(results: pd.DataFrame) -> str:
    """Markdown: means and standard errors over seeds for each run and judge."""
    rows = trained(results).dropna(axis=1, how="all")
    columns = [column for column in LABELS if column in rows]
    labels = [LABELS[column] for column in columns]
    lines = [f"| {' | '.join(['run', 'judge', 'seeds', 'commits', *labels])} |"]
    lines.append("|---" * (4 + len(labels)) + "|")
    for (name, judge), group in rows.groupby(["run", "judge"], sort=False):
        seeds = " ".join(map(str, group["seed"]))
        commits = " ".join(group["commit"].unique())
        means = [mean_and_error(group[column].dropna()) for column in columns]
        lines.append(f"| {' | '.join([name, judge, seeds, commits, *means])} |")
    return "\n".join(lines) + "\n"


def mean_and_error(values: pd.Series) -> str:
    """Mean ± standard error; of one seed, the value alone."""
    if values.empty:
        return ""
    error = f" ± {values.sem():.3f}" if len(values) > 1 else ""
    return f"{values.mean():+.3f}{error}"


# --- command line ---------------------------------------------------------------------------------


def run_all(runs: Sequence[Run], epochs: int, judge: Path, jobs: int) -> None:
    """Some runs at a time, one thread each, beside the judge's server; keeps each finished run."""
    OUT.mkdir(parents=True, exist_ok=True)
    server = os.environ | {
        "VLLM_ENGINE": os.environ.get("VLLM_ENGINE", "transformers"),
        "VLLM_LABEL": "paco-study",
        "VLLM_PORT": str(SERVED["port"]),
        "VLLM_MODEL_NAMES": SERVED["model"],
        "VLLM_MODEL_PATHS": str(judge.resolve()),
    }
    pool = ThreadPoolExecutor(jobs)
    try:
        subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env=server, check=True)
        futures = {pool.submit(finish, run, epochs): run for run in runs}
        for future in as_completed(futures):
            keep(futures[future], judge_id(judge), future.result())
    finally:
        pool.shutdown(cancel_futures=True)
        subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env=server, check=True)


def main() -> None:
    """Train what is missing of the named studies, then print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--runs", nargs="+", help="names of runs; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--epochs", type=int, default=20, help="epochs of runs that do not set their own"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--judge", type=Path, default=HERE / "out" / "judge")
    parser.add_argument("--table", action="store_true", help="only the table of finished runs")
    arguments = parser.parse_args()
    if not arguments.table:
        train_missing(arguments)
    results = read_results()
    for study in arguments.studies:
        print(table(results[results["study"] == study]))


def train_missing(arguments: argparse.Namespace) -> None:
    """Train the runs that results.csv does not have of this commit and this judge."""
    if not (arguments.judge / "config.json").exists():
        raise SystemExit(f"no judge in {arguments.judge}: run quickstart/run.sh, or set --judge")
    results = read_results()
    same = (results["commit"] == commit()) & (results["judge"] == judge_id(arguments.judge))
    finished = set(results.loc[same, ["study", "run", "seed"]].itertuples(index=False, name=None))
    runs = []
    for study in arguments.studies:
        for seed in arguments.seeds:
            for name in STUDIES[study].runs:
                is_chosen = arguments.runs is None or name in arguments.runs
                if is_chosen and (study, name, seed) not in finished:
                    runs.append(Run(study, name, seed))
    run_all(runs, arguments.epochs, arguments.judge, arguments.jobs)


if __name__ == "__main__":
    main()
