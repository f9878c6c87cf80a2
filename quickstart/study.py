"""Trains the toy generator with other options and seeds; results.csv keeps what came out.

    study.py rewards                           # which reward keeps images different
    study.py objectives --runs nft awm         # objectives with the quickstart's reward
    study.py resolution aggregation            # the two claims of docs/method.md
    study.py methods                           # w − b of six methods for the same epochs
    study.py rewards --table                   # trains nothing: the table of finished runs

It serves the judge in models/study_judge on port 8000, and writes its prompts, the quickstart's of
seed 0, itself. A run that results.csv has for this commit, judge and version of torch is not
repeated, and a stopped run continues. Its folder in out/study is named by all of them. With
NUM_PROCESSES=2 a training uses two cores.

A run has a row for each evaluation; the last row has all columns:

- ``judge``: the start of the SHA-256 of its files, until November 2026 of its weights alone. Runs
  with different judges are not averaged.
- ``torch``: its version; empty until November 2026.
- ``oracle_w``, ``oracle_b``, ``oracle_w_minus_b``: docs/rewards.md, "Agreement beyond other
  images", read by the oracle on open prompts.
- ``consistency_after`` and the other measures of paco_toy/summary.py.
- ``cpu_minutes``: of the trainer's processes, evaluations included, without the judge.
- ``teraflops``: of the transformer in all epochs so far, without evaluations; by estimate.py since
  December 2026, only in the study ``methods``, without what trained a teacher.

Only rows until November 2026 have the rest: ``_before`` training, ``judge_`` and ``other_`` (w and b
by the judge, and by a judge with another base, wording and training pairs), ``…_kappa`` =
(w − b) / (1 − b), ``minutes``, and ``warnings`` (signs of collapse with their first epoch). The
quickstart's settings were chosen on seeds 0 to 9. Rows of the study ``hacks`` are runs with planted
rewards, which chose the signs of collapse (commit e2bd40d); ``quickstart`` are whole quickstarts,
before commit e89da58 of a toy world whose prompts also left the shape open. Commit c7f64444 has
``naming_variety``, ``kl_0.5`` and ``nft_16_epochs``, and commit e793f4b1 the rewards ``gardo`` and
``entropy``.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pandas as pd

from paco_grpo.options import read_options
from paco_judge.files import read_json
from paco_toy.build_world import build_prompt_sets
from paco_toy.summary import commit, judge_id, scores_of

HERE = Path(__file__).resolve().parent
GRPO = HERE.parent / "PaCo-GRPO"
RESULTS = HERE / "results.csv"
OUT = HERE / "out" / "study"
WORLD = OUT / "world"
JUDGE = HERE / "models" / "study_judge"
KEY = ["study", "run", "seed", "commit", "judge", "torch"]

ORACLE = "paco_toy.oracle:oracle_"
# With weight 0, between_images is monitored: w and b in every epoch, and their warning.
CONSISTENCY = {"train.reward_fn.between_images": 0.0}
LONG = {"num_epochs": 80}
OBJECTIVE = {"num_epochs": 20, "eval_freq": 10}
# With one optimizer step an epoch, the ratio is 1 and these objectives are the same.
RATIO = OBJECTIVE | {"train.gradient_step_per_epoch": 2}
DGPO = {"train.loss_type": "dgpo", "train.sigma_fraction": 0.7}
LARGER = {"train.resolution": 128, "train.batch_size": 32, "num_epochs": 6, "eval_freq": 3}
# Alignment is between 0 and 1; darkness varies twelve times as much.
BOTH = {f"{ORACLE}alignment": 1.0, "paco_toy.darkness:darkness": 1.0}
LOUD_AND_QUIET = {
    "train.reward_fn": BOTH,
    "train.reward_fn_kwargs": {},
    "train.num_sigmas": 2,
    "test.reward_fn": BOTH,
    "test.resolution": 64,
    "num_epochs": 8,
    "eval_freq": 8,
}
AGGREGATIONS = {
    "sum": None,
    "log_tame": "log_tame_aggregate_fn",
    # The log of both rewards in every epoch.
    "log_tame_always": {"name": "log_tame_aggregate_fn", "arguments": {"threshold": 0}},
    "advantage_sum": "weighted_advantage_sum_aggregate_fn",
    "product": "product_aggregate_fn",
}

METHOD = {"num_epochs": 16, "eval_freq": 16, "save_freq": 4, "num_checkpoint_limit": 4}
ALL_BUT_LAST = (0, 1, 2, 3, 4)

# Run -> configuration and options of the training.
Runs = dict[str, tuple[str, dict[str, Any]]]
REWARDS: Runs = {
    "base": ("toy_t2is_awm", {"num_epochs": 0}),
    "consistency": ("toy_t2is_awm", CONSISTENCY),
    "variety": ("toy_t2is_awm", {}),
    "kl_0.1": ("toy_t2is_awm", CONSISTENCY | {"train.beta": 0.1}),
    "consistency_80": ("toy_t2is_awm", CONSISTENCY | LONG),
    "variety_80": ("toy_t2is_awm", LONG),
    "consistency_nft": ("toy_t2is_nft", CONSISTENCY),
    "variety_nft": ("toy_t2is_nft", {}),  # the quickstart's training
}
OBJECTIVES: Runs = {
    "ppo": ("toy_t2is", RATIO | {"train.loss_type": "ppo"}),
    "guard_grpo": ("toy_t2is", RATIO | {"train.loss_type": "guard_grpo"}),
    "flow_dppo": ("toy_t2is", RATIO | {"train.loss_type": "flow_dppo"}),
    "nft": ("toy_t2is_nft", OBJECTIVE),
    "awm": ("toy_t2is_awm", OBJECTIVE),
    "dgpo": ("toy_t2is_nft", OBJECTIVE | DGPO),
}
# Compared with ``awm`` of the objectives, which is the same training at 64 px.
RESOLUTION: Runs = {"128px": ("toy_t2is_awm", LARGER)}
METHODS: Runs = {
    # The window moves on three times.
    "ppo": (
        "toy_t2is",
        METHOD
        | {
            "sample.noise_steps": ALL_BUT_LAST,
            "sample.num_noise_steps": 2,
            "sample.window_epochs": 4,
        },
    ),
    # η and the share of trained steps are DanceGRPO's.
    "dance": (
        "toy_t2is",
        METHOD
        | {
            "sample.transition": "dance_sde",
            "sample.noise_level": 0.3,
            "sample.noise_steps": ALL_BUT_LAST,
            "sample.num_noise_steps": 3,
        },
    ),
    "dpo": ("toy_t2is_nft", METHOD | {"train.loss_type": "dpo"}),
    # It must go as far as its teacher, but overshoots with the same learning rate.
    "opd": (
        "toy_t2is",
        METHOD
        | {
            "train.loss_type": "opd",
            "train.learning_rate": 5e-4,
            "train.gradient_step_per_epoch": 4,
            "sample.noise_steps": ALL_BUT_LAST,
            "sample.same_latent": False,
            "sample.latents_per_prompt": 1,
        },
    ),
    "crd": ("toy_t2is_nft", METHOD | {"train.loss_type": "crd"}),
    "nft": ("toy_t2is_nft", METHOD),
}
# Run -> the run of the next seed from which it learns.
TEACHERS = {"opd": "nft"}
STUDIES = {
    "methods": METHODS,
    "rewards": REWARDS,
    "objectives": OBJECTIVES,
    "resolution": RESOLUTION,
    "aggregation": {
        name: ("toy_t2is_awm", LOUD_AND_QUIET | {"train.aggregate_fn": function})
        for name, function in AGGREGATIONS.items()
    },
}


def folder_of(key: dict[str, Any]) -> Path:
    """The run's folder. One of another commit, judge or torch is another run."""
    return OUT / "{study}-{run}-seed{seed}-{judge}-{commit}-torch{torch}".format_map(key)


def training_arguments(key: dict[str, Any]) -> list[str]:
    """Arguments of train_flux.sh."""
    config, options = STUDIES[key["study"]][key["run"]]
    seed = key["seed"]
    options = {
        "seed": seed,
        "dataset": os.path.relpath(WORLD / "prompts", GRPO),
        "save_dir": os.path.relpath(OUT, GRPO),
        "run_name": folder_of(key).name,
        "resume_from": "latest",
        "max_train_minutes": 600,
        "eval_freq": 20,
        "test.seed": 1000 + seed,
        "test.num_images": 96,
    } | options
    teacher = teacher_of(key)
    if teacher is not None:
        folder = folder_of(teacher) / "checkpoints" / f"epoch_{options['num_epochs']:04d}"
        options["train.opd_teachers"] = {teacher["run"]: str(folder)}
    return [config, *(f"--config.{name}={value}" for name, value in options.items())]


def teacher_of(key: dict[str, Any]) -> dict[str, Any] | None:
    """The run from which a run learns, of another seed."""
    if key["run"] not in TEACHERS:
        return None
    return key | {"run": TEACHERS[key["run"]], "seed": key["seed"] + 1}


def agreement_arguments(checkpoint: Path, seed: int) -> list[str]:
    """Arguments of evaluate.py: w and b of a run's checkpoint."""
    rewards = {f"{ORACLE}consistency": 1.0, f"{ORACLE}between_images": 1.0}
    return [
        "--config=config/grpo.py:toy_t2is",
        f"--config.dataset={os.path.relpath(WORLD / 'open_prompts', GRPO)}",
        f"--config.test.seed={1000 + seed}",
        f"--config.test.reward_fn={rewards}",
        "--images_per_prompt=8",
        f"--adapter={checkpoint}",
        f"--output={agreement_folder(checkpoint)}",
    ]


def agreement_folder(checkpoint: Path) -> Path:
    """Where ``agreement_arguments`` writes."""
    return checkpoint.parent.parent / "agreement" / checkpoint.name


def train(key: dict[str, Any]) -> list[dict[str, Any]]:
    """Trains and evaluates; returns the columns of each evaluation."""
    folder = folder_of(key)
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    script = ["bash", "scripts/single_node/train_flux.sh", *training_arguments(key)]
    is_new = not folder.exists()
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(script, cwd=GRPO, env=environment, check=True)
    after = getrusage(RUSAGE_CHILDREN)
    studies_methods = key["study"] == "methods"
    checkpoints = sorted((folder / "checkpoints").glob("epoch_*"))
    rows = evaluations_of(folder)
    for checkpoint in checkpoints if studies_methods else checkpoints[-1:]:
        arguments = agreement_arguments(checkpoint, key["seed"])
        evaluate = [sys.executable, "scripts/evaluate.py", *arguments]
        subprocess.run(evaluate, cwd=GRPO, env=environment, check=True)
        row = rows.setdefault(checkpoint.name, {"epochs": epochs_of(checkpoint)})
        row.update(agreement_of(checkpoint))
    if studies_methods:
        of_epoch = teraflops_of_epoch(key)
        for row in rows.values():
            row["teraflops"] = of_epoch * row["epochs"]
    evaluations = [rows[name] for name in sorted(rows)]
    if is_new:  # else, only part of it was spent now
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        evaluations[-1]["cpu_minutes"] = spent / 60
    return evaluations


def epochs_of(folder: Path) -> int:
    """Epochs before a checkpoint or evaluation."""
    return int(folder.name.removeprefix("epoch_"))


def evaluations_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Columns of every evaluation of a run, by its name."""
    rows = {}
    for evaluation in sorted((folder / "eval").glob("epoch_*")):
        scores, _ = scores_of(evaluation)
        means = scores.mean().add_suffix("_after").to_dict()
        count = {"epochs": epochs_of(evaluation), "images": len(scores)}
        rows[evaluation.name] = count | means
    return rows


def teraflops_of_epoch(key: dict[str, Any]) -> float:
    """What the transformer computes in an epoch of a run: sampling and training."""
    # Seconds to import, and --table does not need it.
    from paco_grpo.estimate.generator import estimate

    config, *arguments = training_arguments(key)
    with contextlib.chdir(GRPO):
        options, name = read_options(["--config", f"config/grpo.py:{config}", *arguments])
        epoch = estimate(options, name, processes=1, gpu_bytes=0).epoch
    return (epoch["denoise"] + epoch["train"]) / 1e12


def agreement_of(checkpoint: Path) -> dict[str, float]:
    """Columns of the evaluation that ``agreement_arguments`` asks for."""
    results = read_json(agreement_folder(checkpoint) / "results.json")["results"]["adapter"]
    columns = {"w": "within", "b": "between", "w_minus_b": "within_minus_between"}
    return {f"oracle_{name}": results[f"oracle_{key}"]["mean"] for name, key in columns.items()}


def read_results() -> pd.DataFrame:
    """All rows of results.csv."""
    results = pd.read_csv(RESULTS, dtype={"commit": str, "judge": str, "torch": str})
    return results if "torch" in results else results.assign(torch=None)


def keep(key: dict[str, Any], evaluations: list[dict[str, Any]]) -> None:
    """Adds the rows of a finished run to results.csv."""
    rows = pd.DataFrame(evaluations).assign(**key)
    results = pd.concat([read_results(), rows])
    results.to_csv(RESULTS, index=False, float_format="%.4f")


def trained(results: pd.DataFrame) -> pd.DataFrame:
    """The last row of each run: what the trained model does. ``diversity`` is 1 − b.

    Of the study ``methods``, ``teraflops_to_half`` are those until w − b was first 0.5.
    """
    last = results.drop_duplicates(KEY, keep="last")
    is_half = (results["study"] == "methods") & (results["oracle_w_minus_b"] >= 0.5)
    first = results[is_half].drop_duplicates(KEY).set_index(KEY)["teraflops"]
    last = last.join(first.rename("teraflops_to_half"), on=KEY)
    return last.assign(diversity=1 - last["oracle_b"])


LABELS = {
    "oracle_w": "w",
    "diversity": "diversity 1 − b",
    "oracle_w_minus_b": "w − b",
    "consistency_after": "consistency, full prompts",
    "consistency_before": "the same before RL",
    "alignment_after": "panels show what is named",
    "darkness_after": "darkness, %",
    "cpu_minutes": "CPU minutes",
    "teraflops": "TFLOPs",
    "teraflops_to_half": "TFLOPs to w − b = 0.5",
}


def table(results: pd.DataFrame) -> str:
    """Means ± standard errors over the seeds of each run and judge."""
    rows = trained(results).dropna(axis=1, how="all").rename(columns=LABELS)
    columns = pd.Index(LABELS.values()).intersection(rows.columns, sort=False)
    groups = rows.groupby(["run", "judge"], sort=False)
    columns_of_means = {"seed": list} | dict.fromkeys(columns, mean_and_error)
    if LABELS["teraflops_to_half"] in columns:
        columns_of_means[LABELS["teraflops_to_half"]] = values_of_seeds
    return groups.agg(columns_of_means).to_string()


def mean_and_error(values: pd.Series) -> str:
    """Mean ± standard error; nan for one seed."""
    return f"{values.mean():.3f} ± {values.sem():.3f}"


def values_of_seeds(values: pd.Series) -> str:
    """The value of each seed; nan for one that has none."""
    return ", ".join(f"{value:.1f}" for value in values)


def finish(key: dict[str, Any]) -> None:
    """Train a run, and first its teacher, unless results.csv has them."""
    if (read_results()[KEY] == pd.Series(key)).all(axis=1).any():
        return
    teacher = teacher_of(key)
    if teacher is not None:
        finish(teacher)
    keep(key, train(key))


def train_missing(
    studies: list[str], runs: list[str] | None, seeds: list[int], judge: Path
) -> None:
    """Train the runs that results.csv does not have of this commit, judge and torch."""
    if commit() == "unknown":
        raise SystemExit("study.py notes the commit of its runs: it needs git and a clone")
    build_prompt_sets(WORLD, seed=0)
    judge_of_all = judge_id(judge)  # what is served, whatever the folder holds later
    server = os.environ | {
        "VLLM_ENGINE": os.environ.get("VLLM_ENGINE", "transformers"),
        "VLLM_LABEL": "paco-study",
        "VLLM_PORT": "8000",
        "VLLM_MODEL_NAMES": "PaCo-Reward-Toy",
        "VLLM_MODEL_PATHS": str(judge.resolve()),
    }
    subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env=server, check=True)
    try:
        for study in studies:
            for seed in seeds:
                for run in STUDIES[study]:
                    values = [study, run, seed, commit(), judge_of_all, version("torch")]
                    if runs is None or run in runs:
                        finish(dict(zip(KEY, values, strict=True)))
    finally:
        subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env=server, check=True)


def main() -> None:
    """Train what is missing of the named studies, then print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--runs", nargs="+", help="names of runs; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--judge", type=Path, default=JUDGE)
    parser.add_argument("--table", action="store_true", help="only the table of finished runs")
    arguments = parser.parse_args()
    if not arguments.table:
        train_missing(arguments.studies, arguments.runs, arguments.seeds, arguments.judge)
    results = read_results()
    for study in arguments.studies:
        print(table(results[results["study"] == study]), end="\n\n")


if __name__ == "__main__":
    main()
