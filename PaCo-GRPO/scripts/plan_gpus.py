"""How many of N GPUs should serve the judge, and how long does an epoch take?

Rewards are computed while the next images are sampled: with too few judges the generators wait, with too many the judges
are idle and sampling is slow. This prints the expected epoch time of every split and marks the best one.

    # seconds per image and GPU measured on one GPU, a judge measured at 40 pairs a second on one GPU
    python scripts/plan_gpus.py --gpus 8 --sample-seconds 1.9 --train-seconds 1.1 --judge-pairs-per-second 40

    # the same from files: a run's folder (metrics.jsonl, plan.json) and the report of benchmarks/judge_load.py
    python scripts/plan_gpus.py --gpus 8 --run runs/NAME --judge-load benchmarks/results/judge_load.json

    # before there is a run: seconds from benchmarks/epoch.py on one GPU, random weights of the real size
    python scripts/plan_gpus.py --gpus 8 --images 672 --epoch benchmarks/results/epoch.json --judge-load …

    # is the plan right? Predict the measured run itself from its own seconds, and compare
    python scripts/plan_gpus.py --run runs/NAME --judge-load benchmarks/results/judge_load.json --check

What is computed, for G generating and J serving GPUs, S images an epoch in batches of B, P pairs an image, a judge of
R pairs a second and GPU, s and t seconds a GPU needs to sample and to train on an image, u seconds for the rest:

    sample = n·B·s             n = ceil(S / (G·B)) batches one after the other
    reward = S·P / (J·R)       all pairs of the epoch
    scored = max(sample + last batch's pairs / (J·R), first batch's seconds + reward)
    epoch  = scored + ceil(S / G)·t + u

The judge starts when the first batch is sampled and cannot finish before the last one is. Other rewards, evaluation and
checkpoints count only if --other-seconds includes them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


class PlanError(ValueError):
    """Invalid or missing numbers; the message names the argument."""


@dataclass(frozen=True)
class Workload:
    """One epoch, and how fast one GPU works.

    Attributes:
        images: m·k, over all GPUs.
        batch_size: Images per GPU and sampling batch.
        pairs: Judge questions per image; 0 = no judge.
        sample_seconds: Per image on one GPU, with decoding.
        train_seconds: Per image on one GPU, all trained steps.
        other_seconds: Per epoch, independent of the split.
        pairs_per_second: Rate of a judge on one GPU with enough questions in flight.
    """

    images: int
    batch_size: int
    pairs: int
    sample_seconds: float
    train_seconds: float
    other_seconds: float
    pairs_per_second: float

    def check(self) -> None:
        """
        Raises:
            PlanError: A number that makes no sense.
        """
        for name in ("images", "batch_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("pairs", "sample_seconds", "train_seconds", "other_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} = {getattr(self, name)} must be 0 or more")
        if self.pairs and not 0 < self.pairs_per_second < math.inf:
            raise PlanError(f"pairs_per_second = {self.pairs_per_second} must be greater than 0")


@dataclass(frozen=True)
class Split:
    """Expected seconds of an epoch for one division of the GPUs.

    Attributes:
        generating: GPUs that sample and train.
        serving: GPUs of the judge.
        sample: Until the last image is sampled.
        reward: Total work of the judge.
        wait: From the last image until all scores have arrived.
        train: The update.
        epoch: Total.
        bottleneck: sampling | rewards | training, whichever takes longest.
    """

    generating: int
    serving: int
    sample: float
    reward: float
    wait: float
    train: float
    epoch: float
    bottleneck: str


def predict(work: Workload, generating: int, serving: int) -> Split:
    """Expected times of one split; formulas at the top of the file.

    Raises:
        PlanError: No GPU generates, or none serves although there are pairs to judge.
    """
    if generating < 1:
        raise PlanError("at least one GPU has to generate")
    if work.pairs and serving < 1:
        raise PlanError("at least one GPU has to serve the judge: there are pairs to score")
    batches = math.ceil(work.images / (generating * work.batch_size))
    first = min(work.batch_size, math.ceil(work.images / generating)) * work.sample_seconds
    sample = batches * first
    rate = serving * work.pairs_per_second
    reward = work.images * work.pairs / rate if work.pairs else 0.0
    last = reward / batches
    wait = max(last, first + reward - sample) if work.pairs else 0.0
    train = math.ceil(work.images / generating) * work.train_seconds
    longest = {"sampling": sample, "rewards": reward, "training": train}
    return Split(
        generating, serving, sample, reward, wait, train, sample + wait + train + work.other_seconds,
        max(longest, key=longest.__getitem__),
    )  # fmt: skip


def splits(work: Workload, gpus: int, gpus_per_judge: int = 1) -> list[Split]:
    """Every split of ``gpus``, in order of serving GPUs, which come in multiples of ``gpus_per_judge``.

    Raises:
        PlanError: There are too few GPUs for a judge and a generator.
    """
    work.check()
    if gpus_per_judge < 1:
        raise PlanError(f"gpus_per_judge = {gpus_per_judge} must be at least 1")
    counts = range(gpus_per_judge, gpus, gpus_per_judge) if work.pairs else range(1)
    if not counts or gpus < 1:
        raise PlanError(f"{gpus} GPU(s) are too few for a judge on {gpus_per_judge} and one generating GPU")
    return [predict(work, gpus - serving, serving) for serving in counts]


def best(found: Sequence[Split]) -> Split:
    """The shortest epoch; among equals, the one with the fewest serving GPUs."""
    return min(found, key=lambda split: (split.epoch, split.serving))


def pairs_of_layout(layout: str) -> int:
    """Pairs of sub-figures of a grid: 2x2 has 6, 2x3 has 15.

    Raises:
        PlanError: Not rows x columns.
    """
    rows, cross, columns = layout.lower().partition("x")
    if not cross or not rows.isdigit() or not columns.isdigit():
        raise PlanError(f"--layout {layout!r} is not rows x columns, such as 2x2")
    return math.comb(int(rows) * int(columns), 2)


# --- measured numbers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Medians over the epochs of a run or of a benchmark."""

    images: int
    batch_size: int
    processes: int
    sample_seconds: float  # of one process for an image
    train_seconds: float
    other_seconds: float  # of an epoch
    reward_wait: float  # of an epoch
    epoch: float  # of an epoch


def read_run(folder: Path) -> Measured:
    """From a run's ``metrics.jsonl`` and ``plan.json``; the first epoch warms up and is left out where there are more.

    Raises:
        PlanError: A file or its training epochs are missing.
    """
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise PlanError(f"--run {folder}: {error}. Give the folder of a run (metrics.jsonl, plan.json).") from error
    rows = [row for row in rows if row.get("phase") == "train" and "time/epoch_s" in row]
    if not rows:
        raise PlanError(f"--run {folder} has no finished training epoch")
    times = {
        name: statistics.median(row[f"time/{name}_s"] for row in rows[1:] or rows)
        for name in ("sample", "reward_wait", "train", "epoch")
    }
    return measured_of(plan, times)


def read_epoch(file: Path, setting: str | None = None) -> Measured:
    """From a report of ``benchmarks/epoch.py`` or ``benchmarks/sweep.py``, whose first epoch is not counted.

    Raises:
        PlanError: The file is no such report, or has several settings and ``setting`` names none of them.
    """
    try:
        results = {result["label"]: result for result in json.loads(file.read_text(encoding="utf-8"))["results"]}
        if setting is None and len(results) == 1:
            (setting,) = results
        if setting not in results:
            raise PlanError(f"--epoch {file} measured {', '.join(results)}: choose one with --setting")
        seconds = {name: found["median"] for name, found in results[setting]["seconds"].items()}
        renamed = {"sample": "sampling", "reward_wait": "reward_wait", "train": "training", "epoch": "epoch"}
        return measured_of(results[setting]["plan"], {name: seconds[theirs] for name, theirs in renamed.items()})
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError(f"--epoch {file} is no report of epoch.py ({type(error).__name__}: {error})") from error


def measured_of(plan: dict, times: dict[str, float]) -> Measured:
    """From a run's plan and the median seconds of its epochs (sample, reward_wait, train, epoch)."""
    share = plan["samples"] / plan["num_processes"]
    return Measured(
        images=plan["samples"],
        batch_size=plan["sample_batch_size"],
        processes=plan["num_processes"],
        sample_seconds=times["sample"] / share,
        train_seconds=times["train"] / share,
        other_seconds=max(0.0, times["epoch"] - times["sample"] - times["reward_wait"] - times["train"]),
        reward_wait=times["reward_wait"],
        epoch=times["epoch"],
    )


def read_judge_load(file: Path, target: str | None = None) -> float:
    """Pairs per second in the report of ``benchmarks/judge_load.py``: the best number of questions in flight.

    Raises:
        PlanError: The file is no such report, or has several servers and ``target`` names none of them.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["targets"]
        known = list(dict.fromkeys(row["target"] for row in rows))
        if target is None and len(known) == 1:
            target = known[0]
        if target not in known:
            raise PlanError(f"--judge-load {file} has the servers {', '.join(known)}: choose one with --judge-target")
        return max(row["pairs_per_second"] for row in rows if row["target"] == target)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError(
            f"--judge-load {file} is no report of judge_load.py ({type(error).__name__}: {error})"
        ) from error


# --- command line -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--gpus", type=int, help="GPUs to divide")
    found.add_argument("--gpus-per-judge", type=int, default=1, help="GPUs of one copy of the judge (tensor parallel)")
    images = found.add_argument_group("an epoch")
    images.add_argument("--images", type=int, help="m·k (default: of --run or --epoch, else 42·16 = 672)")
    images.add_argument(
        "--batch-size", type=int, help="images per GPU and sampling batch (default: of --run or --epoch, else 1)"
    )
    images.add_argument("--layout", default="2x2", help="of the grids: 2x2 has 6 pairs, 2x3 has 15")
    images.add_argument("--pairs", type=int, help="pairs per image, instead of --layout; 0: no judge; editing: 2")
    speed = found.add_argument_group("how fast one GPU is")
    speed.add_argument("--run", type=Path, help="folder of a run, for seconds per image")
    speed.add_argument("--epoch", type=Path, help="or a JSON report of benchmarks/epoch.py or sweep.py")
    speed.add_argument("--setting", help="which of its variants, if it has several (as its table names them)")
    speed.add_argument("--sample-seconds", type=float, help="to sample and decode an image")
    speed.add_argument("--train-seconds", type=float, help="to train on an image")
    speed.add_argument(
        "--other-seconds", type=float, help="of an epoch, for any split (default: of --run or --epoch, else 0)"
    )
    speed.add_argument("--judge-load", type=Path, help="judge_load.json of benchmarks/judge_load.py")
    speed.add_argument("--judge-target", help="which of its servers, if it has several")
    speed.add_argument("--judge-gpus", type=int, default=1, help="GPUs that server had (default 1)")
    speed.add_argument("--judge-pairs-per-second", type=float, help="of one GPU, instead of --judge-load")
    found.add_argument(
        "--check", action="store_true", help="predict --run (or --epoch) itself and compare with what it measured"
    )
    found.add_argument("--json", action="store_true", help="print JSON")
    return found


def workload(arguments: argparse.Namespace) -> tuple[Workload, Measured | None]:
    """The workload from files and arguments; arguments take precedence.

    Raises:
        PlanError: A number is missing.
    """
    if arguments.run and arguments.epoch:
        raise PlanError("--run and --epoch both contain seconds per image: give one of them")
    measured = read_run(arguments.run) if arguments.run else None
    if arguments.epoch:
        measured = read_epoch(arguments.epoch, arguments.setting)

    def value(name: str, otherwise: float | None) -> float:
        given = getattr(arguments, name)
        if given is None:
            given = getattr(measured, name, None) if measured else otherwise
        if given is None:
            raise PlanError(f"--{name.replace('_', '-')} is missing: give it, --run or --epoch")
        return given

    pairs = arguments.pairs if arguments.pairs is not None else pairs_of_layout(arguments.layout)
    rate = arguments.judge_pairs_per_second
    if rate is None and arguments.judge_load:
        rate = read_judge_load(arguments.judge_load, arguments.judge_target) / arguments.judge_gpus
    if rate is None and pairs:
        raise PlanError("how fast is the judge? Give --judge-pairs-per-second or --judge-load (or --pairs 0)")
    work = Workload(
        images=int(value("images", 672)),
        batch_size=int(value("batch_size", 1)),
        pairs=pairs,
        sample_seconds=value("sample_seconds", None),
        train_seconds=value("train_seconds", None),
        other_seconds=value("other_seconds", 0.0),
        pairs_per_second=rate or 0.0,
    )
    return work, measured


def table(found: Sequence[Split]) -> str:
    """One line a split, the best marked."""
    chosen = best(found)
    lines = [f"{'generate':>8} {'serve':>5} {'sample s':>9} {'judge s':>8} {'wait s':>7} {'train s':>8} {'epoch s':>8}"]
    for split in found:
        mark = f"  <- best; most time: {split.bottleneck}" if split is chosen else ""
        lines.append(
            f"{split.generating:>8} {split.serving:>5} {split.sample:>9.1f} {split.reward:>8.1f} {split.wait:>7.1f} "
            f"{split.train:>8.1f} {split.epoch:>8.1f}{mark}"
        )
    return "\n".join(lines)


def check(work: Workload, measured: Measured, serving: int) -> str:
    """Predicted and measured times of the run that the seconds come from.

    Sampling and training are inputs of the prediction; the waiting and the total are what is tested.
    """
    split = predict(work, measured.processes, serving)
    rows = [("wait for rewards", split.wait, measured.reward_wait), ("epoch", split.epoch, measured.epoch)]
    lines = [f"{'':<17} {'predicted':>9} {'measured':>9}"]
    lines += [f"{name:<17} {expected:>8.2f}s {real:>8.2f}s" for name, expected, real in rows]
    return "\n".join([*lines, f"epoch: predicted / measured = {split.epoch / measured.epoch:.3f}"])


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 after an error message."""
    arguments = parser().parse_args(given)
    try:
        work, measured = workload(arguments)
        if arguments.check:
            if measured is None:
                raise PlanError("--check compares with what was measured: give --run or --epoch")
            print(check(work, measured, arguments.judge_gpus))
            return 0
        if arguments.gpus is None:
            raise PlanError("--gpus is missing: how many GPUs are there to divide?")
        found = splits(work, arguments.gpus, arguments.gpus_per_judge)
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"workload": asdict(work), "splits": [asdict(s) for s in found], "best": asdict(best(found))}))
        return 0
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
