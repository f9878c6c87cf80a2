"""The quickstart over seeds, and two longer studies. Run by hand; finished runs are kept in quickstart/results.csv.

    .venv/bin/python quickstart/study.py quickstart --seeds 10 11 12   # run.sh for each seed, with a judge of its own; 13 min each
    .venv/bin/python quickstart/study.py rewards                       # two runs at a time, judged by quickstart/out/judge
    .venv/bin/python quickstart/study.py objectives
    .venv/bin/python quickstart/study.py rewards --table               # no training: the table of finished runs

rewards
    judge           the quickstart's reward: the judge's consistency within an image times variety between images
    plain           the judge's consistency alone
    alignment       a control without a judge: the oracle's share of panels that show what is named
    named_variety   that share times the judge's variety between images
    oracle          consistency and variety, both by the oracle
objectives
    ppo, guard_grpo, flow_dppo, nft, awm, dgpo, each with the oracle's consistency and variety as its reward

A row has the commit and the judge (the SHA-256 of its weights) of its run. Runs of another judge are never averaged with
these; runs of another commit are only taken for finished with --any_commit, and the table lists the commits. The quickstart's
settings were chosen on seeds 0 to 9; seeds from 10 on were run once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from paco_toy.summary import MEASURES, commit, judge_id, judge_measures, policy_measures

REPO = Path(__file__).resolve().parent.parent
GRPO, HERE = REPO / "PaCo-GRPO", REPO / "quickstart"
RESULTS, OUT = HERE / "results.csv", HERE / "out" / "study"
SERVED = {"base_url": "http://127.0.0.1:8077", "model": "PaCo-Reward-Toy"}
SERVER = {"VLLM_MODEL_NAMES": SERVED["model"], "VLLM_PORT": "8077", "VLLM_LABEL": "paco-study"}
ORACLE = "paco_toy.oracle:oracle_"


@dataclass(frozen=True)
class Kind:
    """What the runs of one name have in common: training's rewards, further options, the named configuration."""

    rewards: Mapping[str, float]
    options: Mapping[str, object] = field(default_factory=dict)
    config: str = "toy_t2is_awm"


JUDGED = ("consistency_score", "between_images")
CEILING = {f"{ORACLE}consistency": 1.0, f"{ORACLE}between_images": 8.0}
# Objectives with a ratio need two optimizer steps an epoch: at the first one it is 1, and all of them are the same.
RATIO = {"train.gradient_step_per_epoch": 2}
# Images sampled without noise: those of one initial noise would be equal.
FORWARD = {"sample.noise_level": 0.0, "sample.same_latent": False, "sample.latents_per_prompt": 1, "train.num_sigmas": 3}
OBJECTIVES = {
    "ppo": RATIO,
    "guard_grpo": RATIO,
    "flow_dppo": RATIO,
    "nft": FORWARD | {"train.sigma_one": True, "train.beta": 0.02},
    "awm": FORWARD | {"train.beta": 0.02, "train.awm_slow_beta": 0.0},
    "dgpo": FORWARD | {"train.sigma_one": True, "train.sigma_fraction": 0.7, "train.beta": 0.02},
}
STUDIES = {
    "rewards": {
        "judge": Kind({"consistency_score": 1.0, "between_images": 8.0}),
        "plain": Kind({"consistency_score": 1.0}),
        "alignment": Kind({f"{ORACLE}alignment": 1.0}),
        "named_variety": Kind({f"{ORACLE}alignment": 1.0, "between_images": 8.0}),
        "oracle": Kind(CEILING),
    },
    "objectives": {name: Kind(CEILING, more | {"train.loss_type": name}, "toy_t2is") for name, more in OBJECTIVES.items()},
}


def arguments_of(name: str, kind: Kind, seed: int, epochs: int) -> list[str]:
    """Arguments of train_flux.sh."""
    options = {
        "seed": seed, "save_dir": os.path.relpath(OUT, GRPO), "run_name": f"{name}-seed{seed}", "resume_from": "latest",
        "num_epochs": epochs, "max_train_minutes": 600, "eval_freq": epochs, "num_threads": 1,
        "train.reward_fn": dict(kind.rewards), "train.reward_fn_kwargs": {n: SERVED for n in kind.rewards if n in JUDGED},
        "test.seed": 1000 + seed, "test.num_images": 192, "test.reward_fn_kwargs": {"consistency_score": SERVED},
    }  # fmt: skip
    return [kind.config, *(f"--config.{key}={value}" for key, value in (options | dict(kind.options)).items())]


def row_of(study: str, name: str, seed: int, judge: str, policy: Mapping[str, Any], judged: Mapping[str, Any] | None = None) -> dict:
    """A row of results.csv."""
    row = {"study": study, "run": name, "seed": seed, "commit": commit(), "judge": judge, "epochs": policy["epochs"], "images": policy["num_images"]}
    if judged:
        row |= {"judge_accuracy": judged["judge"]["lora"]["accuracy"], "kendalltau": judged["rank"]["kendalltau"]}
    return row | {f"{m}_{when}": policy[when][m] for m in MEASURES if m in policy["after"] for when in ("before", "after")}


def read_results() -> pd.DataFrame:
    """Finished runs."""
    return pd.read_csv(RESULTS, dtype={"commit": str, "judge": str})


def keep(row: Mapping[str, Any]) -> None:
    """Add a finished run."""
    known = read_results()
    pd.concat([known, pd.DataFrame([row])])[known.columns].to_csv(RESULTS, index=False, float_format="%.4f")


def mean_and_error(values: Sequence[float]) -> str:
    """Mean over seeds and its standard error from their spread; of one seed, the value alone."""
    values = np.asarray(values, dtype=float)
    values = values[~np.isnan(values)]
    error = f" ± {values.std(ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{values.mean():+.3f}{error}" if len(values) else ""


def table(results: pd.DataFrame, against: str | None = None) -> str:
    """Markdown: mean change of each measure over seeds, for each run name and judge; of run ``against``, differences paired by seed."""
    change = {label: results[f"{name}_after"] - results[f"{name}_before"] for name, label in MEASURES.items()}
    rows = results[["run", "judge", "seed", "commit"]].assign(**change)
    lines = [" | ".join(["", "run", "judge", "seeds", "commits", *change, ""]).strip(), "|---" * (4 + len(change)) + "|"]
    for (name, judge), own in rows.groupby(["run", "judge"], sort=False):
        seeds = own["seed"]
        if against:
            base = rows[(rows["run"] == against) & (rows["judge"] == judge)].set_index("seed")
            seeds = seeds[seeds.isin(base.index)]
            if name == against or seeds.empty:
                continue
            values = {k: base.loc[seeds, k].to_numpy() - own.set_index("seed").loc[seeds, k].to_numpy() for k in change}
            name = f"{against} − {name}"
        else:
            values = {k: own[k] for k in change}
        cells = [name, judge, " ".join(map(str, seeds)), " ".join(own["commit"].unique()), *map(mean_and_error, values.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def train(study: str, todo: Sequence[tuple[str, int]], judge: Path, epochs: int, jobs: int) -> None:
    """Train ``jobs`` runs at a time, one thread each, beside one server of the judge; each finished run becomes a row."""
    OUT.mkdir(parents=True, exist_ok=True)
    server = {**os.environ, **SERVER, "VLLM_MODEL_PATHS": str(judge)}
    if not shutil.which("nvidia-smi"):
        server.setdefault("VLLM_ENGINE", "transformers")
    subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env=server, check=True)

    def one(name: str, seed: int) -> tuple[str, int]:
        command = ["bash", "scripts/single_node/train_flux.sh", *arguments_of(name, STUDIES[study][name], seed, epochs)]
        log = OUT / f"{name}-seed{seed}.log"
        print(f"started {name}, seed {seed}; log: {log}", flush=True)
        with open(log, "w") as file:
            env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
            subprocess.run(command, cwd=GRPO, env=env, stdout=file, stderr=subprocess.STDOUT, check=True)
        return name, seed

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(one, *each) for each in todo]):
            name, seed = future.result()
            keep(row_of(study, name, seed, judge_id(judge), policy_measures(OUT / f"{name}-seed{seed}")))
    finally:
        pool.shutdown(cancel_futures=True)
        subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env=server, check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["quickstart", *STUDIES])
    parser.add_argument("--runs", nargs="+", help="names of runs; default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each run of rewards and objectives")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--judge", type=Path, default=HERE / "out" / "judge")
    parser.add_argument("--any_commit", action="store_true", help="runs of other commits count as finished")
    parser.add_argument("--table", action="store_true", help="no training")
    arguments = parser.parse_args()
    study, judge = arguments.study, arguments.judge
    names = list(STUDIES.get(study, {"quickstart": None}))
    if unknown := set(arguments.runs or ()) - set(names):
        parser.error(f"--runs: unknown {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    todo = [(name, seed) for seed in arguments.seeds for name in arguments.runs or names]
    if not arguments.table:
        known = read_results().query("study == @study")
        if not arguments.any_commit:
            known = known[known["commit"] == commit()]
        if study != "quickstart":
            if not (judge / "config.json").exists():
                sys.exit(f"no judge in {judge}: run quickstart/run.sh first, or name one with --judge")
            known = known[known["judge"] == judge_id(judge)]
        finished = set(zip(known["run"], known["seed"], strict=True))
        todo = [each for each in todo if each not in finished]
        if study == "quickstart":
            for _, seed in todo:  # all epochs on any machine
                subprocess.run(["bash", str(HERE / "run.sh"), "--seed", str(seed), "--minutes", "600"], check=True)
                out = HERE / "out"
                keep(row_of(study, study, seed, "own", policy_measures(out / "runs" / "toy_t2is_awm"), judge_measures(out)))
        elif todo:
            train(study, todo, judge, arguments.epochs, arguments.jobs)
    results = read_results().query("study == @study")
    print(table(results))
    for against in ("judge",) if study == "rewards" else ():
        print(f"differences, paired by seed:\n\n{table(results, against)}")


if __name__ == "__main__":
    main()
