"""The quickstart over seeds, and which reward keeps images different. Finished runs are rows of quickstart/results.csv.

    study.py quickstart --seeds 10 11 12     # run.sh for each seed, judge included; 13 min each
    study.py rewards                         # two runs at a time, judged by quickstart/out/judge
    study.py rewards --other_judge DIR --other_question FILE     # and evaluated by another judge
    study.py objectives --seeds 0            # the six objectives with the quickstart's reward
    study.py objectives resolution aggregation --runs awm nft 128px ... --seeds 10 11 12     # several studies in turn
    study.py rewards --table                 # no training: the table of finished runs

The other judge of results.csv is a second clone's quickstart/out/judge, with another base (from tools/: `python -m
toy_models.build judge --seed 7 --out ../quickstart/models`), other wording (`theme` and `pair` in questions.toml) and
other pairs (`bash quickstart/run.sh --seed 100`). FILE holds its `theme`. It was made twice: rows of f8a6db2 and bc81b73
were read by the first one (0.955 accurate), all others by the second (0.938).

Every run is evaluated on 24 open prompts with 8 images each: w, b and kappa by the oracle, the judge and the other
judge. Errors are between seeds. `warnings` are signs of collapse (docs/recovery.md), each with the epoch of its first
warning; `judge` is the start of the SHA-256 of its weights. Runs of different judges are never averaged; runs of
another commit count as finished with --any_commit only. The quickstart's settings were chosen on seeds 0 to 9; seeds
from 10 on were run once. Rows of the study `hacks` are runs of planted rewards (quickstart/paco_toy/hacks.py of commit
e2bd40d), with which the signs of collapse were chosen. Rows of the study `quickstart` are of an earlier toy world,
whose prompts also left the shape open (before commit e89da58).
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
from pathlib import Path
from typing import Any

import pandas as pd

from paco_toy.summary import (
    MEASURES,
    commit,
    judge_id,
    judge_measures,
    policy_measures,
    scores_of,
)
from paco_toy.world import read_jsonl

REPO = Path(__file__).resolve().parent.parent
GRPO, HERE = REPO / "PaCo-GRPO", REPO / "quickstart"
RESULTS, OUT = HERE / "results.csv", HERE / "out" / "study"
SERVED = {"port": 8077, "model": "PaCo-Reward-Toy"}
OTHER = {"port": 8078, "model": "PaCo-Reward-Other"}
ORACLE = "paco_toy.oracle:oracle_"
JUDGED = ("consistency_score", "between_images")
# Weight 0: monitored, for kappa in every epoch and the warning that it can give.
CONSISTENCY, VARIETY = (
    {"train.reward_fn": {"consistency_score": 1.0, "between_images": weight}}
    for weight in (0.0, 8.0)
)
# Objectives with a ratio need two optimizer steps an epoch: at the first one it is 1, and all of them are the same.
RATIO = {"train.gradient_step_per_epoch": 2}
# Without noise, images of one initial noise would be equal.
FORWARD = {
    "sample.noise_level": 0.0,
    "sample.same_latent": False,
    "sample.latents_per_prompt": 1,
    "train.num_sigmas": 3,
}
OBJECTIVES = {
    "ppo": RATIO,
    "guard_grpo": RATIO,
    "flow_dppo": RATIO,
    "nft": FORWARD | {"train.sigma_one": True, "train.beta": 0.02},
    "awm": FORWARD | {"train.beta": 0.02, "train.awm_slow_beta": 0.0},
    "dgpo": FORWARD | {"train.sigma_one": True, "train.sigma_fraction": 0.7, "train.beta": 0.02},
}
# Read by the oracle alone: fewer questions to the judge.
BY_ORACLE = {
    "test.reward_fn": {f"{ORACLE}consistency": 1.0},
    "test.reward_fn_kwargs": {},
    "eval_freq": 10,
    "test.num_images": 64,
}
# A reward that varies much more than the other one.
LOUD = {
    "train.reward_fn": {f"{ORACLE}alignment": 1.0, "paco_toy.darkness:darkness": 1.0},
    "test.reward_fn": {f"{ORACLE}alignment": 1.0, "paco_toy.darkness:darkness": 1.0},
    "test.reward_fn_kwargs": {},
    "test.resolution": 64,
    "train.num_sigmas": 2,
    "num_epochs": 8,
    "eval_freq": 8,
    "save_freq": 0,
}
LATENTS, LONG = {"train.diversity_features": "latents"}, {"num_epochs": 80, "eval_freq": 20}
CONFIGS = {
    "rewards": "toy_t2is_awm",
    "objectives": "toy_t2is",
    "resolution": "toy_t2is_awm",
    "aggregation": "toy_t2is_awm",
}
# Study -> run -> options of its training.
STUDIES = {
    "rewards": {
        "base": {},  # no training
        "consistency": CONSISTENCY,
        "variety": VARIETY,  # as in the quickstart
        # A control without a judge's consistency: the oracle's share of panels that show what is named.
        "naming_variety": {"train.reward_fn": {f"{ORACLE}alignment": 1.0, "between_images": 8.0}},
        "kl_0.1": CONSISTENCY | {"train.beta": 0.1},
        "kl_0.5": CONSISTENCY | {"train.beta": 0.5},
        "entropy": CONSISTENCY | LATENTS | {"train.perceptual_entropy": 0.1},
        "gardo": CONSISTENCY | LATENTS | {"train.neighbor_factor": True},
        "consistency_80": CONSISTENCY | LONG,
        "variety_80": VARIETY | LONG,
    },
    "objectives": {
        name: VARIETY | BY_ORACLE | more | {"train.loss_type": name}
        for name, more in OBJECTIVES.items()
    },
    # Beside the run ``awm`` of the objectives, which trains at 64 px.
    "resolution": {
        "128px": VARIETY
        | BY_ORACLE
        | {
            "train.resolution": 128,
            "train.batch_size": 32,
            "num_epochs": 6,
            "eval_freq": 3,
            "save_freq": 3,
        },
    },
    "aggregation": {
        "sum": LOUD | {"train.aggregate_fn": None},
        "log_tame": LOUD | {"train.aggregate_fn": "log_tame_aggregate_fn"},
        "advantage_sum": LOUD | {"train.aggregate_fn": "weighted_advantage_sum_aggregate_fn"},
        "product": LOUD | {"train.aggregate_fn": "product_aggregate_fn"},
    },
}
# Column -> the within-image reward whose kappa it is.
JUDGES = {
    "oracle": "oracle_consistency",
    "judge": "consistency_score",
    "other": "other_consistency",
}
SHOWN = {
    "oracle_w": "w", "oracle_b": "diversity 1 − b", "oracle_kappa": "κ", "consistency_after": "consistency, full prompts",
    "judge_kappa": "κ by the judge", "other_kappa": "κ by another judge", "minutes": "minutes",
}  # fmt: skip


def arguments_of(study: str, name: str, seed: int, epochs: int) -> list[str]:
    """Arguments of train_flux.sh."""
    own = STUDIES[study][name]
    options = {
        "seed": seed, "save_dir": os.path.relpath(OUT, GRPO), "run_name": f"{name}-seed{seed}", "resume_from": "latest",
        "num_epochs": epochs, "max_train_minutes": 600, "eval_freq": epochs,
        "train.reward_fn_kwargs": {reward: SERVED for reward in own["train.reward_fn"] if reward in JUDGED},
        "test.seed": 1000 + seed, "test.num_images": 96, "test.reward_fn_kwargs": {"consistency_score": SERVED},
    }  # fmt: skip
    return [CONFIGS[study], *(f"--config.{key}={value}" for key, value in (options | own).items())]


def agreement_command(
    folder: Path, seed: int, other: Mapping[str, str], by_judge: bool = True
) -> list[str]:
    """Evaluates the last checkpoint in ``folder``, or the base model; ``other``: arguments of the other judge's rewards."""
    rewards, kwargs = [f"{ORACLE}consistency", f"{ORACLE}between_images"], {}
    if by_judge:
        rewards, kwargs = [*JUDGED, *rewards], {name: SERVED for name in JUDGED}
    if other:
        names = [f"paco_toy.oracle:other_{name}" for name in ("consistency", "between_images")]
        rewards, kwargs = rewards + names, kwargs | {name: dict(other) for name in names}
    options = {
        "dataset": "../quickstart/out/world/open_prompts", "test.seed": 1000 + seed,
        "test.reward_fn": dict.fromkeys(rewards, 1.0), "test.reward_fn_kwargs": kwargs,
    }  # fmt: skip
    checkpoints = sorted((folder / "checkpoints").glob("epoch_*"))
    return [
        sys.executable, "scripts/evaluate.py", "--config", "config/grpo.py:toy_t2is_awm",
        "--images_per_prompt", "8" if by_judge else "4",
        "--output", str(folder / "agreement"), *(("--adapter", str(checkpoints[-1])) if checkpoints else ()),
        *(f"--config.{key}={value}" for key, value in options.items()),
    ]  # fmt: skip


def agreement_columns(folder: Path) -> dict[str, float]:
    """Columns of results.csv from ``agreement_command``'s results."""
    (found,) = json.loads((folder / "agreement" / "results.json").read_text())["agreement"].values()
    values, columns = {"w": "within", "b": "between", "kappa": "kappa"}, {}
    for judge, reward in JUDGES.items():
        each = found.get(f"all, {reward}") or {}
        columns |= {
            f"{judge}_{name}": each[key]["mean"] for name, key in values.items() if each.get(key)
        }
    return columns


def warnings_of(log: str) -> str:
    """Signs of collapse in a run's log, each with the epoch of its first warning: "reward/kappa@12 …"."""
    first: dict[str, str] = {}
    for epoch, signal in re.findall(r"after epoch (\d+): .*\((\S+) in metrics.jsonl\)", log):
        first.setdefault(signal, epoch)
    return " ".join(f"{signal}@{epoch}" for signal, epoch in first.items())


def row_of(
    study: str,
    name: str,
    seed: int,
    judge: str,
    policy: Mapping[str, Any],
    more: Mapping[str, Any] = {},
) -> dict:
    """A row of results.csv; ``policy``: ``policy_measures`` of a run, empty for the base model."""
    row = {"study": study, "run": name, "seed": seed, "commit": commit(), "judge": judge} | dict(
        more
    )
    if policy:
        row |= {"epochs": policy["epochs"], "images": policy["num_images"]}
        row |= {
            f"{m}_{when}": policy[when][m]
            for m in MEASURES
            if m in policy["after"]
            for when in ("before", "after")
        }
    return row


def evaluations_of(folder: Path) -> list[dict[str, float]]:
    """What every evaluation of a run measured: the measures of the oracle and the means of its rewards."""
    found = []
    for rows in sorted((folder / "eval").glob("epoch_*/eval_data.jsonl")):
        scores, _ = scores_of(rows.parent)
        measured = {
            f"{name}_after": scores[name].mean()
            for name in ("consistency", "agreement", "alignment")
        }
        rewards = pd.DataFrame([row["rewards"] for row in read_jsonl(rows)], dtype=float)
        if "darkness" in rewards:
            measured["darkness_after"] = rewards["darkness"].mean()
        epoch = int(rows.parent.name.removeprefix("epoch_"))
        found.append({"epochs": epoch, "images": len(scores)} | measured)
    return found


def read_results() -> pd.DataFrame:
    return pd.read_csv(RESULTS, dtype={"commit": str, "judge": str})


def keep(*rows: Mapping[str, Any]) -> None:
    """Adds a finished run to results.csv."""
    pd.concat([read_results(), pd.DataFrame(rows)]).to_csv(
        RESULTS, index=False, float_format="%.4f"
    )


def mean_and_error(values: Sequence[float]) -> str:
    """Mean ± standard error; of one seed, the value alone."""
    values = pd.Series(values, dtype=float).dropna()
    error = f" ± {values.sem():.3f}" if len(values) > 1 else ""
    return f"{values.mean():+.3f}{error}" if len(values) else ""


def table(results: pd.DataFrame, against: str | None = None) -> str:
    """Markdown: means over seeds for each run and judge; with ``against``, that run minus each other, paired by seed.

    Of the quickstart, the changes from before to after training; of the other studies, what the trained model does.
    """
    if "oracle_kappa" in results and results["oracle_kappa"].notna().any():
        values = {
            label: results[c]
            for c, label in SHOWN.items()
            if c in results and results[c].notna().any()
        }
        values["diversity 1 − b"] = 1 - values["diversity 1 − b"]
    else:
        values = {
            label: results[f"{name}_after"] - results[f"{name}_before"]
            for name, label in MEASURES.items()
        }
    rows = results[["run", "judge", "seed", "commit"]].assign(**values)
    if against:
        base, others = rows[rows["run"] == against], rows[rows["run"] != against]
        rows = others.merge(base, on=["judge", "seed"], suffixes=("", " of base"))
        rows["run"] = f"{against} − " + rows["run"]
        for label in values:
            rows[label] = rows[f"{label} of base"] - rows[label]
    lines = [
        " | ".join(["", "run", "judge", "seeds", "commits", *values, ""]).strip(),
        "|---" * (4 + len(values)) + "|",
    ]
    for (name, judge), own in rows.groupby(["run", "judge"], sort=False):
        cells = [name, judge, " ".join(map(str, own["seed"])), " ".join(own["commit"].unique())]
        lines.append(
            f"| {' | '.join([*cells, *(mean_and_error(own[label]) for label in values)])} |"
        )
    return "\n".join(lines) + "\n"


def train(todo: Sequence[tuple[str, str, int]], arguments: argparse.Namespace) -> None:
    """Trains some runs at a time, one thread each, beside a server of each judge; keeps each finished run."""
    judge, other, question = arguments.judge, arguments.other_judge, arguments.other_question
    other_options = (
        {} if other is None else OTHER | ({"question": str(question.resolve())} if question else {})
    )
    OUT.mkdir(parents=True, exist_ok=True)
    servers = []
    for served, folder in ((SERVED, judge), (OTHER, other)):
        if folder is not None:
            variables = {
                "VLLM_PORT": str(served["port"]),
                "VLLM_LABEL": f"paco-study-{served['port']}",
            }
            variables |= {
                "VLLM_MODEL_NAMES": served["model"],
                "VLLM_MODEL_PATHS": str(folder.resolve()),
            }
            servers.append({"VLLM_ENGINE": "transformers", **os.environ, **variables})

    def one(study: str, name: str, seed: int) -> list[dict]:
        folder = OUT / f"{name}-seed{seed}"
        log, began = folder.with_suffix(f"{folder.suffix}.log"), time.monotonic()
        print(f"started {name}, seed {seed}; log: {log}", flush=True)
        env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
        by_judge = study == "rewards"
        resumed = folder.exists()
        cpu = float("nan")
        with open(log, "a") as file:

            def run(command: Sequence[str]) -> float:
                """CPU minutes of a command and its processes."""
                process = subprocess.Popen(
                    command, cwd=GRPO, env=env, stdout=file, stderr=subprocess.STDOUT
                )
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    raise subprocess.CalledProcessError(process.returncode, command)
                return (usage.ru_utime + usage.ru_stime) / 60

            if name != "base":
                options = arguments_of(study, name, seed, arguments.epochs)
                cpu = run(["bash", "scripts/single_node/train_flux.sh", *options])
            minutes = (time.monotonic() - began) / 60
            if study != "aggregation":
                run(agreement_command(folder, seed, other_options, by_judge))
        policy = policy_measures(folder) if name != "base" else {}
        more = {"minutes": minutes, "warnings": warnings_of(log.read_text(errors="replace"))}
        if not resumed:
            more["cpu_minutes"] = cpu
        if study != "aggregation":
            more |= agreement_columns(folder)
        row = row_of(study, name, seed, judge_id(judge), policy, more)
        if by_judge:
            return [row]
        key = {column: row[column] for column in ("study", "run", "seed", "commit", "judge")}
        *earlier, last = evaluations_of(folder)
        return [*(key | each for each in earlier), row | last]

    pool = ThreadPoolExecutor(arguments.jobs)
    try:
        for server in servers:
            subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env=server, check=True)
        for future in as_completed([pool.submit(one, *each) for each in todo]):
            keep(*future.result())
    finally:
        pool.shutdown(cancel_futures=True)
        for server in servers:
            subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env=server, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=["quickstart", *STUDIES])
    parser.add_argument("--runs", nargs="+", help="names of runs; default all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--epochs", type=int, default=20, help="epochs of each run of rewards and objectives"
    )
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--judge", type=Path, default=HERE / "out" / "judge")
    parser.add_argument("--other_judge", type=Path, help="a second judge, which only evaluates")
    parser.add_argument(
        "--other_question", type=Path, help="text file with the other judge's question"
    )
    parser.add_argument(
        "--any_commit", action="store_true", help="runs of other commits count as finished"
    )
    parser.add_argument("--table", action="store_true", help="no training")
    arguments = parser.parse_args()
    studies, judge = arguments.studies, arguments.judge
    study = studies[0]
    todo = [
        (study, name, seed)
        for seed in arguments.seeds
        for name in arguments.runs
        or [name for study in studies for name in STUDIES.get(study, ["quickstart"])]
        for study in studies
        if name in STUDIES.get(study, ["quickstart"])
    ]
    if unknown := set(arguments.runs or ()) - {name for _, name, _ in todo}:
        parser.error(f"--runs: no run of {' and '.join(studies)}: {', '.join(sorted(unknown))}")
    if not arguments.table:
        known = read_results()
        if not arguments.any_commit:
            known = known[known["commit"] == commit()]
        if study != "quickstart":
            if not (judge / "config.json").exists():
                sys.exit(
                    f"no judge in {judge}: run quickstart/run.sh first, or name one with --judge"
                )
            known = known[known["judge"] == judge_id(judge)]
        finished = set(zip(known["study"], known["run"], known["seed"], strict=True))
        todo = [each for each in todo if each not in finished]
        if study == "quickstart":
            for _, _, seed in todo:  # all epochs on any machine
                subprocess.run(
                    ["bash", str(HERE / "run.sh"), "--seed", str(seed), "--minutes", "600"],
                    check=True,
                )
                out = HERE / "out"
                judged = judge_measures(out)
                more = {
                    "judge_accuracy": judged["judge"]["lora"]["accuracy"],
                    "kendalltau": judged["rank"]["kendalltau"],
                }
                keep(
                    row_of(
                        study,
                        study,
                        seed,
                        "own",
                        policy_measures(out / "runs" / "toy_t2is_awm"),
                        more,
                    )
                )
        elif todo:
            train(todo, arguments)
    results = read_results().query("study in @studies")
    print(table(results.drop_duplicates(["study", "run", "seed", "commit", "judge"], keep="last")))
    if studies == ["rewards"]:
        print(f"differences, paired by seed:\n\n{table(results, 'variety')}")


if __name__ == "__main__":
    main()
