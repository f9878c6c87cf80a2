"""Trains the toy generator with other options and seeds; results.csv keeps what came out.

    study.py rewards                           # which reward keeps images different
    study.py objectives --runs nft awm         # objectives with the quickstart's reward
    study.py resolution aggregation            # the two claims of docs/method.md
    study.py methods                           # w − b of six methods for the same epochs
    study.py mend                              # a judge with a blind spot, mended by labels
    study.py one_gpu --seeds 1                 # the settings of docs/one-gpu.md on the toy's generator
    study.py correlation --seeds 0             # trains nothing: scores of small and large images
    study.py rewards --table                   # trains nothing: the table of finished runs

It serves the judge in models/study_judge on port 8000 (or VLLM_PORT), in the study ``mend`` those
that it trains itself (paco_toy/mend.py), and writes its prompts, the quickstart's of seed 0. A run
that results.csv has for this commit, judge and version of torch is not repeated, and a stopped run
continues. Its folder in out/study is named by all of them. With NUM_PROCESSES=2 a training uses two
cores.

A run has a row for each evaluation; the last row has all columns:

- ``judge``: the start of the SHA-256 of its files, until November 2026 of its weights alone. Runs
  with different judges are not averaged.
- ``torch``: its version; empty until November 2026.
- ``oracle_w``, ``oracle_b``, ``oracle_w_minus_b``: docs/rewards.md, "Agreement beyond other
  images", read by the oracle on open prompts.
- ``consistency_after`` and the other measures of paco_toy/summary.py.
- ``judge_accuracy``, ``further_accuracy``, ``further_unseen_accuracy``: of the judges of the study
  ``mend`` (``accuracies`` of paco_toy/mend.py).
- ``cpu_minutes``: of the trainer's processes, evaluations included, without the judge.
- ``teraflops``: of the transformer in all epochs so far, without evaluations and without what
  trained a teacher; by estimate.py since December 2026.

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
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pandas as pd

import study_tables
from paco_grpo.options import read_options
from paco_judge.files import read_json
from paco_toy.build_world import build_prompt_sets, build_prompts
from paco_toy.summary import commit, judge_id, scores_of
from study_tables import HERE, KEY

GRPO = HERE.parent / "PaCo-GRPO"
OUT = HERE / "out" / "study"
WORLD = OUT / "world"
JUDGE = HERE / "models" / "study_judge"

JUDGED = ("consistency_score", "between_images")  # rewards of the toy that ask the judge
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
# The quickstart's training, with enough pictures for labels and for 500 further pairs.
MENDING = {"test.num_images": 192}
MEND: Runs = {
    "base": ("toy_t2is_nft", MENDING | {"num_epochs": 0}),
    "exploited": ("toy_t2is_nft", MENDING),
    "mended": ("toy_t2is_nft", MENDING),
    "random": ("toy_t2is_nft", MENDING),
}
# The settings of t2is_one_gpu, with the sizes and models of the toy world.
ONE_GPU = {
    "pretrained.model": "../quickstart/models/flux",
    "pretrained.quantize": None,
    "max_sequence_length": 32,
    "mixed_precision": "no",
    "enable_gradient_checkpointing": False,
    "speed.offload_text": False,
    "speed.offload_vae": False,
    "sample.guidance_scale": 3.5,
    "sample.batch_size": 64,
    "train.resolution": 64,
    "train.batch_size": 64,
    "train.reward_fn_kwargs.consistency_score.model": "PaCo-Reward-Toy",
    "train.reward_fn_kwargs.between_images.model": "PaCo-Reward-Toy",
    "test.reward_fn": {
        "consistency_score": 1.0,
        f"{ORACLE}consistency": 1.0,
        f"{ORACLE}alignment": 1.0,
        f"{ORACLE}distinct": 1.0,
    },
    "test.reward_fn_kwargs": {},
    "test.resolution": 128,
    "test.num_steps": 10,
    "test.batch_size": 32,
    "eval_freq": 8,
}
# Run -> the run of the next seed from which it learns.
TEACHERS = {"opd": "nft"}
STUDIES = {
    "methods": METHODS,
    "mend": MEND,
    "one_gpu": {
        "recipe": ("t2is_one_gpu", ONE_GPU),
        "slow": ("t2is_one_gpu", ONE_GPU | {"train.learning_rate": 3e-4}),  # as t2is
    },
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
    if "train.reward_fn" not in options:  # the configuration's, which ask the judge
        options |= judge_options()
    teacher = teacher_of(key)
    if teacher is not None:
        folder = folder_of(teacher) / "checkpoints" / f"epoch_{options['num_epochs']:04d}"
        options["train.opd_teachers"] = {teacher["run"]: str(folder)}
    return [config, *(f"--config.{name}={value}" for name, value in options.items())]


def judge_options() -> dict[str, Any]:
    """Options that send the questions of the toy's rewards to the study's judge."""
    return {f"train.reward_fn_kwargs.{name}.port": judge_port() for name in JUDGED}


def judge_port() -> int:
    """The port of the judge's server."""
    return int(os.environ.get("VLLM_PORT", "8000"))


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
    is_new = not folder.exists()
    before = getrusage(RUSAGE_CHILDREN)
    run(["bash", "scripts/single_node/train_flux.sh", *training_arguments(key)])
    after = getrusage(RUSAGE_CHILDREN)
    checkpoints = sorted((folder / "checkpoints").glob("epoch_*"))
    rows = evaluations_of(folder)
    for checkpoint in checkpoints if key["study"] == "methods" else checkpoints[-1:]:
        evaluate(agreement_arguments(checkpoint, key["seed"]))
        row = rows.setdefault(checkpoint.name, {"epochs": epochs_of(checkpoint)})
        row.update(agreement_of(checkpoint))
    of_epoch = teraflops_of_epoch(key)
    for row in rows.values():
        row["teraflops"] = of_epoch * row["epochs"]
    evaluations = [rows[name] for name in sorted(rows)]
    if key["study"] == "mend" and key["run"] != "base":
        evaluations[-1] |= judged_columns(key)
    if is_new:  # else, only part of it was spent now
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        evaluations[-1]["cpu_minutes"] = spent / 60
    return evaluations


def judged_columns(key: dict[str, Any]) -> dict[str, float]:
    """Columns of the judge of a run in the study ``mend``.

    Of the exploited run's pictures, pairs are chosen and labeled first.
    """
    from paco_toy import mend  # seconds, as above

    folder = folder_of_judges(key["seed"])
    name = key["run"]
    if name == "exploited":
        mend.choose_pairs(folder, folder_of(key), key["seed"], f"http://127.0.0.1:{judge_port()}")
        name = "blind"
    return mend.accuracies(folder, folder / "judges" / name, key["seed"])


def folder_of_judges(seed: int) -> Path:
    """The judges of the study ``mend``, with their data."""
    return OUT / f"mend-judges-seed{seed}-{commit()}-torch{version('torch')}"


def evaluate(arguments: list[str]) -> None:
    """Runs evaluate.py."""
    run([sys.executable, "scripts/evaluate.py", *arguments])


def run(command: list[str], **variables: str) -> None:
    """Runs a command in PaCo-GRPO, with ``variables`` of its environment."""
    environment = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    subprocess.run(command, cwd=GRPO, env=os.environ | environment, check=True)


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


def finish(key: dict[str, Any]) -> None:
    """Train a run, and first its teacher, unless results.csv has them."""
    if (study_tables.read_results()[KEY] == pd.Series(key)).all(axis=1).any():
        return
    teacher = teacher_of(key)
    if teacher is not None:
        finish(teacher)
        if not folder_of(teacher).is_dir():  # it was trained on another machine
            train(teacher)
    study_tables.add_results(key, train(key))


def train_missing(
    studies: list[str], runs: list[str] | None, seeds: list[int], judge: Path
) -> None:
    """Train the runs that results.csv does not have of this commit, judge and torch."""
    if commit() == "unknown":
        raise SystemExit("study.py notes the commit of its runs: it needs git and a clone")
    build_prompt_sets(WORLD, seed=0)
    if "mend" in studies:
        for seed in seeds:
            finish_mended(runs, seed)
    studies = [study for study in studies if study != "mend"]
    if not studies:
        return
    judge_of_all = judge_id(judge)  # what is served, whatever the folder holds later
    with serving(judge):
        for study in studies:
            for seed in seeds:
                for name in STUDIES[study]:
                    values = [study, name, seed, commit(), judge_of_all, version("torch")]
                    if runs is None or name in runs:
                        finish(dict(zip(KEY, values, strict=True)))


def finish_mended(runs: list[str] | None, seed: int) -> None:
    """Train the missing runs of the study ``mend``, each with its judge, which is trained first.

    Without the exploited run there are no pictures to label, so it is never left out.
    """
    from paco_toy import mend  # seconds, as above

    folder = folder_of_judges(seed)
    for name in MEND:
        if runs is not None and name not in (*runs, "exploited"):
            continue
        if name in mend.ARMS:
            judge = mend.mended_judge(folder, name, seed)
        else:
            judge = mend.blind_judge(folder, seed)
        values = ["mend", name, seed, commit(), judge_id(judge), version("torch")]
        with serving(judge):
            finish(dict(zip(KEY, values, strict=True)))


@contextlib.contextmanager
def serving(judge: Path) -> Iterator[None]:
    """Serves a judge meanwhile."""
    port = judge_port()
    variables = {
        "VLLM_ENGINE": os.environ.get("VLLM_ENGINE", "transformers"),
        "VLLM_LABEL": f"paco-study-{port}",
        "VLLM_PORT": str(port),
        "VLLM_MODEL_NAMES": "PaCo-Reward-Toy",
        "VLLM_MODEL_PATHS": str(judge.resolve()),
    }
    run(["bash", "vllm_server/launch.sh"], **variables)
    try:
        yield
    finally:
        run(["bash", "vllm_server/stop.sh"], **variables)


def correlation(seeds: list[int], judge: Path) -> str:
    """Correlations of scores between sizes of images (paco_toy/correlation.py), of all seeds."""
    # Seconds to import, and --table does not need it.
    from paco_toy import correlation as measure

    prompts = WORLD / "half_open_prompts"
    build_prompts(prompts, seed=0, train=4, test=measure.PROMPTS)
    of_all = OUT / f"correlation-{judge_id(judge)}-{commit()}-torch{version('torch')}"
    options = [f"--config.{name}={value}" for name, value in judge_options().items()]
    folders: dict[int, list[Path]] = {resolution: [] for resolution in measure.RESOLUTIONS}
    with serving(judge):
        for resolution, of_size in folders.items():
            for seed in seeds:
                folder = of_all / f"{resolution}px-seed{seed}"
                dataset = os.path.relpath(prompts, GRPO)
                evaluate(measure.evaluation_arguments(dataset, resolution, seed, folder) + options)
                of_size.append(folder)
    judged = study_tables.judge_name(judge_id(judge))
    return f"{judged}, seeds {seeds}\n{measure.table(folders).to_string(index=False)}"


# What is measured without training: name -> its text, from the seeds and the judge's folder.
MEASUREMENTS: dict[str, Callable[[list[int], Path], str]] = {"correlation": correlation}


def main() -> None:
    """Train what is missing of the named studies, then print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=[*STUDIES, *MEASUREMENTS])
    parser.add_argument("--runs", nargs="+", help="names of runs; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--judge", type=Path, default=JUDGE)
    parser.add_argument("--table", action="store_true", help="only the table of finished runs")
    arguments = parser.parse_args()
    studies = [name for name in arguments.studies if name in STUDIES]
    if studies and not arguments.table:
        train_missing(studies, arguments.runs, arguments.seeds, arguments.judge)
    for name in studies:
        print(study_tables.tables(study_tables.read_results(), name), end="\n\n")
    for name in arguments.studies:
        if name in MEASUREMENTS:
            print(MEASUREMENTS[name](arguments.seeds, arguments.judge), end="\n\n")


if __name__ == "__main__":
    main()
