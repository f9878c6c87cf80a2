"""The longer studies, run by hand: what RL does to agreement, choice and consistency, over seeds and against controls.

    .venv/bin/python quickstart/study.py rewards             # all runs, two at a time (after quickstart/run.sh, whose judge it serves)
    .venv/bin/python quickstart/study.py objectives
    .venv/bin/python quickstart/study.py rewards --only table        # table and figure again from finished runs

Runs are `train_flux.sh toy_t2is_awm` (objectives: `toy_t2is`) with overrides and a fixed number of epochs, evaluated at 128 px.
quickstart/study_NAME.json has the results of finished runs, which are not run again; unfinished ones continue.

rewards
    judge        the quickstart's reward: the judge's consistency, and variety over the images of a prompt
    plain        the judge's consistency alone: does the choice collapse?
    alignment    a control: the oracle's share of panels that show what is named; no judge
    named_variety   a control that keeps the choice: this share times the judge's variety
    oracle       the ceiling: consistency and variety, both by the oracle
    judge_open, alignment_open   judge and alignment, trained on open prompts only
    32px, 128px  judge, trained at 32 and at 128 px
objectives
    ppo, guard_grpo, flow_dppo, nft, awm, dgpo: each with the oracle's consistency and variety as its reward
exponents
    w3, w4, w5: the oracle's consistency and variety, with other weights of variety than 8
long
    judge and each objective for four times the epochs: is the judge exploited, and does config.health warn before the oracle falls?
two_rewards
    sum, log_tame, advantage_sum, gdpo: ways to join the judge's consistency with a reward of other size, that of small JPEG files
hacks
    identical_panels, fixed_character, lines: rewards that need no prompt (paco_toy/hacks.py). When does config.health warn?
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from paco_grpo.report.style import new_figure, save_png, styled
from paco_toy.hacks import health_of
from paco_toy.processes import failure
from paco_toy.server import cpu_engine
from paco_toy.stages import SERVED_NAME
from paco_toy.summary import MEASURES, Evaluation, policy_measures, read_rows

REPO = Path(__file__).resolve().parent.parent
GRPO = REPO / "PaCo-GRPO"
PROMPTS = REPO / "quickstart" / "out" / "world" / "prompts"
OUT = REPO / "quickstart" / "out" / "study"
OPEN_PROMPTS = OUT / "open_prompts"
LABEL, PORT = "paco-study", "8077"
SERVED = {"base_url": f"http://127.0.0.1:{PORT}", "model": SERVED_NAME}
ORACLE = "paco_toy.oracle:oracle_"
DRAWN = ("agreement", "kappa", "choice", "consistency")
RISE = 0.1  # of agreement, whose minutes are reported


@dataclass(frozen=True)
class Kind:
    """What the runs of one name have in common.

    Attributes:
        rewards: Of training.
        options: Further options of PaCo-GRPO.
        config: Named configuration.
        times: Its runs have so many times the epochs.
    """

    name: str
    color: str
    rewards: Mapping[str, float]
    options: Mapping[str, object] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1, 2)
    config: str = "toy_t2is_awm"
    times: int = 1


JUDGE = {"consistency_score": 1.0, "between_images": 8.0}
CEILING = {f"{ORACLE}consistency": 1.0, f"{ORACLE}between_images": 8.0}
ORACLES = {f"{ORACLE}{name}": 1.0 for name in ("consistency", "alignment", "valid")}  # that watch a hack
# Objectives with a ratio need two optimizer steps an epoch: at the first one it is 1, and all of them are the same.
RATIO = {"train.gradient_step_per_epoch": 2}
# Images sampled without noise: those of one initial noise would be equal.
FORWARD = {"sample.noise_level": 0.0, "sample.same_latent": False, "sample.latents_per_prompt": 1, "train.num_sigmas": 3}
STUDIES = {
    "rewards": (
        Kind("judge", "#1f5fbf", JUDGE),
        Kind("plain", "#b3541e", {"consistency_score": 1.0}),
        Kind("alignment", "#8a8a8a", {f"{ORACLE}alignment": 1.0}),
        Kind("named_variety", "#4a4a4a", {f"{ORACLE}alignment": 1.0, "between_images": 8.0}),
        Kind("oracle", "#2f9e6e", CEILING),
        Kind("judge_open", "#7fa8e6", JUDGE, {"dataset": os.path.relpath(OPEN_PROMPTS, GRPO)}),
        Kind("alignment_open", "#c4c4c4", {f"{ORACLE}alignment": 1.0}, {"dataset": os.path.relpath(OPEN_PROMPTS, GRPO)}),
        Kind("32px", "#8a4fbf", JUDGE, {"train.resolution": 32}, seeds=(0,)),
        Kind("128px", "#c2a014", JUDGE, {"train.resolution": 128}, seeds=(0,)),
    ),
    "objectives": (
        *(
            Kind(name, color, CEILING, options | {"train.loss_type": name}, config="toy_t2is")
            for name, color, options in (
                ("ppo", "#1f5fbf", RATIO),
                ("guard_grpo", "#2f9e6e", RATIO),
                ("flow_dppo", "#8a4fbf", RATIO),
                ("nft", "#b3541e", FORWARD | {"train.sigma_one": True, "train.beta": 0.02}),
                ("awm", "#8a8a8a", FORWARD | {"train.beta": 0.02, "train.awm_slow_beta": 0.0}),
                ("dgpo", "#c2a014", FORWARD | {"train.sigma_one": True, "train.sigma_fraction": 0.7, "train.beta": 0.02}),
            )
        ),
    ),
}
STUDIES["exponents"] = tuple(
    Kind(f"w{exponent}", color, CEILING | {f"{ORACLE}between_images": float(exponent)}, seeds=(0,))
    for exponent, color in {3: "#b3541e", 4: "#8a4fbf", 5: "#2f9e6e"}.items()
)
STUDIES["long"] = tuple(
    replace(kind, name=f"{kind.name}_4x", seeds=(0,), times=4) for kind in (STUDIES["rewards"][0], *STUDIES["objectives"])
)

# JPEG files of 64 px images have 2 to 4 kB, a reward of about -0.005.
SIZED = {"consistency_score": 1.0, "jpeg_compressibility": 1.0}
STUDIES["two_rewards"] = tuple(
    Kind(name, color, SIZED, {"test.reward_fn": SIZED | ORACLES, "train.aggregate_fn": function} | more, seeds=(0,))
    for name, color, function, more in (
        ("sum", "#1f5fbf", None, {}),
        ("log_tame", "#2f9e6e", "log_tame_aggregate_fn", {}),
        ("advantage_sum", "#8a4fbf", "weighted_advantage_sum_aggregate_fn", {}),
        ("gdpo", "#b3541e", "weighted_advantage_sum_aggregate_fn", {"train.aggregate_fn_kwargs.batch_std": True}),
    )
)

STUDIES["hacks"] = tuple(
    Kind(name, color, {hack: 1.0}, {"test.reward_fn": {"consistency_score": 1.0, hack: 1.0} | ORACLES})
    for name, color in {"identical_panels": "#1f5fbf", "fixed_character": "#b3541e", "lines": "#2f9e6e"}.items()
    for hack in (f"paco_toy.hacks:{name}",)
)


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study."""

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


def runs_of(study: str) -> tuple[StudyRun, ...]:
    """The runs of a study, every kind's first seed first: an early end leaves something of each."""
    count = max(len(kind.seeds) for kind in STUDIES[study])
    return tuple(StudyRun(kind, kind.seeds[n]) for n in range(count) for kind in STUDIES[study] if n < len(kind.seeds))


def write_open_prompts() -> None:
    """The world's prompts without the full ones of training."""
    OPEN_PROMPTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROMPTS / "test_metadata.jsonl", OPEN_PROMPTS)
    rows = (PROMPTS / "train_metadata.jsonl").read_text().splitlines(keepends=True)
    (OPEN_PROMPTS / "train_metadata.jsonl").write_text("".join(row for row in rows if json.loads(row)["open"]))


def arguments_of(run: StudyRun, epochs: int, every: int) -> list[str]:
    """Arguments of train_flux.sh."""
    judged = {name: SERVED for name in run.kind.rewards if name in JUDGE}
    options = {
        "seed": run.seed, "save_dir": os.path.relpath(OUT, GRPO), "run_name": run.name, "resume_from": "latest",
        "num_epochs": run.kind.times * epochs, "max_train_minutes": 600, "eval_freq": every, "num_threads": 1,
        "train.reward_fn": run.kind.rewards, "train.reward_fn_kwargs": judged,
        "test.seed": 1000 + run.seed, "test.num_images": 192, "test.reward_fn_kwargs": {"consistency_score": SERVED},
    }  # fmt: skip
    return [f"--config.{name}={value}" for name, value in {**options, **run.kind.options}.items()]


def _train(run: StudyRun, epochs: int, every: int) -> None:
    path = OUT / f"{run.name}.log"
    print(f"started {run.name}; log: {path}", flush=True)
    command = ["bash", "scripts/single_node/train_flux.sh", run.kind.config, *arguments_of(run, epochs, every)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUM_PROCESSES": "1"}
    with path.open("w") as log:
        done = subprocess.run(command, cwd=GRPO, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise SystemExit(failure(run.name, done.returncode, path.read_text(errors="replace"), path))
    (run.folder / "study.done").touch()
    print(f"finished {run.name}", flush=True)


def train(
    runs: Sequence[StudyRun], judge: Path, epochs: int, every: int, jobs: int, finished: Callable[[StudyRun], None]
) -> None:
    """Runs ``jobs`` trainings at a time, one thread each, and one server; calls ``finished`` after each."""
    write_open_prompts()
    served = {"VLLM_MODEL_PATHS": str(judge), "VLLM_MODEL_NAMES": SERVED_NAME, "VLLM_PORT": PORT, "VLLM_LABEL": LABEL} | cpu_engine()
    subprocess.run(["bash", "vllm_server/launch.sh"], cwd=GRPO, env={**os.environ, **served}, check=True)
    pool = ThreadPoolExecutor(jobs)
    try:
        running = {pool.submit(_train, run, epochs, every): run for run in runs}
        for future in as_completed(running):
            future.result()
            finished(running[future])
    finally:
        pool.shutdown(cancel_futures=True)
        subprocess.run(["bash", "vllm_server/stop.sh"], cwd=GRPO, env={**os.environ, **served}, check=True)


def summarize(run: StudyRun) -> dict:
    """The measures of a finished run, its minutes of training and those until agreement had risen by RISE (None = it did not),
    the epoch of each sign's first warning, the limits of config.health at which there would be none, and its evaluations."""
    rows = [row for row in read_rows(run.folder / "metrics.jsonl") if row["phase"] == "train"]
    trained = {row["epoch"]: row["train_time"] / 60 for row in rows}
    found = policy_measures(run.folder)
    folders = sorted(path.parent for path in (run.folder / "eval").glob("epoch_*/eval_data.jsonl"))
    means = {int(folder.name.removeprefix("epoch_")): Evaluation.of(folder).means() for folder in folders}
    course = {name: [[epoch, found[name]] for epoch, found in means.items()] for name in DRAWN}
    (_, before), *later = course["agreement"]
    reached = (epoch for epoch, agreement in later if agreement >= before + RISE)
    until = next(reached, None)
    minutes = {"minutes": rows[-1]["train_time"] / 60, "minutes_to_rise": None if until is None else trained[until]}
    return {"run": run.name, "kind": run.kind.name, "seed": run.seed} | minutes | health_of(run.folder) | found | {"course": course}


def mean_change(results: Sequence[Mapping], name: str) -> str:
    """The mean of a measure's changes, and its standard error: that of each run, as seeds are independent."""
    changes = [result["change"][name] for result in results]
    error = float(np.sqrt(np.sum([change["stderr"] ** 2 for change in changes]))) / len(changes)
    return f"{np.mean([change['mean'] for change in changes]):+.3f} ± {error:.3f}"


def table(results: Sequence[Mapping]) -> str:
    """Markdown: each run, and the mean of each kind with more than one seed."""
    shown = [name for name in MEASURES if all(name in result["change"] for result in results)]
    head = ("run", "epochs (min)", f"min to +{RISE} agreement", "warnings (epoch)", *(MEASURES[name] for name in shown))
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind in dict.fromkeys(result["kind"] for result in results):
        own = [result for result in results if result["kind"] == kind]
        for r in own:
            until = "" if r["minutes_to_rise"] is None else f"{r['minutes_to_rise']:.1f}"
            cells = [r["run"], f"{r['epochs']} ({r['minutes']:.0f})", until]
            cells.append(", ".join(f"{sign} ({epoch})" for sign, epoch in r["warnings"].items()))
            for name in shown:
                change = r["change"][name]
                cells.append(f"{r['before'][name]:.2f} → {r['after'][name]:.2f} ({change['mean']:+.3f} ± {change['stderr']:.3f})")
            lines.append(f"| {' | '.join(cells)} |")
        if len(own) > 1:
            means = " | ".join(f"**{mean_change(own, name)}**" for name in shown)
            lines.append(f"| **{kind}, mean of {len(own)}** | | | | {means} |")
    return "\n".join(lines) + "\n"


def figure(kinds: Sequence[Kind], results: Sequence[Mapping], path: Path) -> None:
    """Agreement, alone and beyond chance, choice and full prompts' consistency against epochs, a line for each run."""
    drawn = new_figure(15, 3.8)
    axes = drawn.subplots(1, len(DRAWN), sharex=True)
    for kind in kinds:
        for number, result in enumerate(r for r in results if r["kind"] == kind.name):
            for axis, name in zip(axes, DRAWN, strict=True):
                label = None if number else kind.name
                axis.plot(*zip(*result["course"][name], strict=True), color=kind.color, linewidth=1.6, label=label)
    for axis, name in zip(axes, DRAWN, strict=True):
        axis.set_title(f"{MEASURES[name]}, 128 px")
        axis.set_xlabel("epochs")
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    save_png(drawn, path, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each run")
    parser.add_argument("--every", type=int, default=10, help="epochs between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--judge", type=Path, default=REPO / "quickstart" / "out" / "judge")
    parser.add_argument("--runs", nargs="*", metavar="RUN", help="runs to do, such as judge-seed0; default all")
    parser.add_argument("--only", choices=["table"], help="no training")
    arguments = parser.parse_args()
    runs = runs_of(arguments.study)
    unknown = set(arguments.runs or ()) - {run.name for run in runs}
    if unknown:
        parser.error(f"--runs: unknown {', '.join(sorted(unknown))}; known: {', '.join(run.name for run in runs)}")
    kinds = [kind.name for kind in STUDIES[arguments.study]]
    place = REPO / "quickstart" / f"study_{arguments.study}"
    file = place.with_suffix(".json")
    results = json.loads(file.read_text()) if file.is_file() else []

    def keep(run: StudyRun) -> None:
        results.append(summarize(run))
        results.sort(key=lambda result: (kinds.index(result["kind"]), result["seed"]))
        file.write_text(json.dumps(results, indent=2) + "\n")

    known = {result["run"] for result in results}
    for run in runs:
        if run.name not in known and run.is_done:
            keep(run)
            known.add(run.name)
    waiting = [run for run in runs if run.name not in known and (not arguments.runs or run.name in arguments.runs)]
    if waiting and arguments.only != "table":
        if not (arguments.judge / "config.json").exists():
            sys.exit(f"no judge in {arguments.judge}: run quickstart/run.sh first, or name one with --judge")
        train(waiting, arguments.judge, arguments.epochs, arguments.every, arguments.jobs, keep)
    if not results:
        raise SystemExit(f"{arguments.study}: no run has finished")
    text = table(results)
    place.with_suffix(".md").write_text(text)
    print(text)
    with styled():
        figure(STUDIES[arguments.study], results, REPO / "assets" / f"{place.name}.png")


if __name__ == "__main__":
    main()
