"""Will a configuration run and fit, and how long will an epoch take? Answered without weights or a GPU, in about a minute.

    python scripts/rehearse.py --config config/grpo.py:t2is --gpu "H100 80GB" --processes 8
    python scripts/rehearse.py --config config/grpo.py:t2is_24gb --memory_gb 24 --config.train.batch_size=2
    python scripts/rehearse.py --config config/grpo.py:t2is --gpus 8     # how many of the 8 should serve the judge?
    python scripts/rehearse.py --run runs/NAME --gpus 8 --judge_load judge_load.json     # the same from measured seconds
    python scripts/rehearse.py --table --processes 8                     # every configuration, on the card it is made for
    python scripts/rehearse.py --judge ../PaCo-Reward/config/paco_reward_lora.yaml --processes 2     # judge training

The trainer's own code runs one small epoch, an evaluation and a checkpoint at the model's real shapes on a GPU that computes
nothing (paco_grpo/rehearsal/fake_gpu.py). Whatever a GPU would refuse is an error here, with its place: tensors on two
devices, data types that do not go together under CUDA's autocast, wrong shapes. Kernels, bytes, FLOPs and live memory are
counted and scaled to a whole epoch. Seconds are predictions from the GPU's data sheet.

The models of paco_grpo/rehearsal/architectures.py are known; any local pipeline folder works too.
Exit status: 0 = runs and fits; 1 = does not fit, or the code failed; 2 = a wrong option.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import runpy
import statistics
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it

from paco_grpo.options import ConfigError, RunOptions, load_options, read_options
from paco_grpo.policies import PolicyLoadError
from paco_grpo.rehearsal import plan, report
from paco_grpo.rehearsal.epoch import REWARD_PARAMETERS, Rehearsal, rehearse
from paco_grpo.rehearsal.models import UnknownModelError, t2is_prompts

ROOT = Path(__file__).resolve().parents[1]
PLACES = str(ROOT / "paco_grpo"), str(ROOT / "config")
WRONG = ConfigError, UnknownModelError, PolicyLoadError, plan.PlanError
# Options that save memory, in the order of what they cost; each is tried with those before it.
REMEDIES = (
    ("sample.batch_size=1", "train.batch_size=1", "test.batch_size=1"),
    ("speed.offload_vae=true",),
    tuple(f"train.reward_fn_kwargs.{name}.device=cpu" for name in REWARD_PARAMETERS),
    ("enable_gradient_checkpointing=true",),
    ("pretrained.quantize=nf4", "sample.merge_lora=false", "speed.compile=false"),
)
# Tokens of a pair's prompt; parameters of Qwen2.5-VL-7B; the share of the stated FLOPS that answers reach.
JUDGE_TOKENS, JUDGE_PARAMETERS, JUDGE_SHARE = 300, 8.3e9, 0.3


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments, rest = parser().parse_known_args(given)
    try:
        gpu_name, gpu = chosen_gpu(arguments)
        if arguments.judge:
            from paco_grpo.rehearsal import judge

            return judge.report(arguments.judge, rest, arguments.processes, arguments.judge_pixels, gpu, gpu_name)
        if arguments.table is not None:
            return table(arguments)
        measured = read_run(arguments.run) if arguments.run else None
        if measured and "--config" not in rest:
            rest = ["--config", str(arguments.run / "config.yaml"), *rest]
        options, name = read_options(rest)
        pairs = pairs_of(options) if arguments.pairs is None else arguments.pairs
        rate, source = judge_rate(arguments, gpu)
        each = arguments.gpus_per_judge or math.ceil(2 * JUDGE_PARAMETERS / (0.8 * gpu.memory))
        processes = max(1, arguments.gpus - each) if arguments.gpus else arguments.processes
        found = work = None
        if measured is None or arguments.gpu or arguments.memory_gb:
            if (found := attempt(options, name, processes, gpu.memory)) is None:
                return 1
            print(report.text(found, gpu, gpu_name))
            work = report.workload(found, gpu, pairs, rate)
        if measured:
            own = plan.Workload(**measured["work"], pairs=pairs, pairs_per_second=rate)
            print(compared(own, work, measured, arguments.judge_gpus if pairs else 0))
            work, processes = own, measured["processes"]
        if pairs:
            size = 2 * JUDGE_PARAMETERS / each / plan.GIB
            print(
                f"\njudge: {pairs:.1f} pairs an image, {rate:.0f} a second and GPU ({source}); {size:.1f} GiB of weights on "
                f"each of {each} GPU(s) of its own"
            )
        if arguments.gpus:
            print(report.split_table(plan.splits(work, arguments.gpus, each)))
        elif pairs:
            print(report.split_table([plan.predict(work, processes, n * each) for n in (1, 2, 4)]))
    except WRONG as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if found is None or report.left(found, gpu) >= 0:
        return 0
    print(remedies(rest, options, processes, gpu, gpu_name))
    return 1


def chosen_gpu(arguments: argparse.Namespace) -> tuple[str, plan.GPU]:
    """Name and numbers of the card."""
    if arguments.memory_gb:
        return f"a card of {arguments.memory_gb:g} GB", plan.gpu_with(arguments.memory_gb)
    name = arguments.gpu or "H100 80GB"
    if name not in plan.GPUS:
        raise plan.PlanError(f"--gpu {name!r} is not known: one of {', '.join(plan.GPUS)}, or give --memory_gb")
    return name, plan.GPUS[name]


def attempt(options: RunOptions, name: str, processes: int, memory: int) -> Rehearsal | None:
    """The rehearsal; None after printing an error of the code and its place."""
    try:
        return rehearse(options, name, processes, memory)
    except WRONG:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PLACES)]
        frames = [f for f in frames if "rehearsal" not in Path(f.filename).parts]
        where = "?"
        if frames:
            where = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}: {frames[-1].line}"
        print(f"{name} fails on a GPU: {type(error).__name__}: {error}\n  at {where}", file=sys.stderr)
        logging.getLogger(__name__).debug("", exc_info=error)
        return None


def remedies(rest: Sequence[str], options: RunOptions, processes: int, gpu: plan.GPU, gpu_name: str) -> str:
    """What to change so that it fits: each remedy was rehearsed."""
    rewards = {*options.train.reward_fn, *options.test.reward_fn}
    given: list[str] = []
    for remedy in REMEDIES:
        more = [f"--config.{o}" for o in remedy if "reward_fn_kwargs" not in o or o.split(".")[2] in rewards]
        try:
            changed, name = read_options([*rest, *given, *more])
        except ConfigError:  # does not go with other options
            continue
        if changed == options:
            continue
        options = changed
        given += more
        found = attempt(options, name, processes, gpu.memory)
        if found is not None and report.left(found, gpu) >= 0:
            return f"it fits with {' '.join(given)} ({report.left(found, gpu) / plan.GIB:.1f} GiB left)"
    return f"it does not fit with {' '.join(given)} either: take a larger GPU, or several (train.sharding=fsdp2)"


# --- the judge, and measured seconds ----------------------------------------------------------------------------------


def pairs_of(options: RunOptions) -> float:
    """Judge questions about an image: pairs of sub-figures of the prompts' layouts, two for an edit, 0 without a judge."""
    from paco_judge.grid import split_prompt

    names = set(options.train.reward_fn)
    if "consistency_score" in names:
        counts = [grid.rows * grid.cols for grid in map(split_prompt, t2is_prompts())]
        return statistics.mean(math.comb(n, 2) for n in counts)
    return 2 if "consistency_for_editing" in names else 0


def judge_rate(arguments: argparse.Namespace, gpu: plan.GPU) -> tuple[float, str]:
    """Pairs a second of a judge on one GPU, and where the number comes from."""
    if arguments.judge_pairs_per_second:
        return arguments.judge_pairs_per_second, "given"
    if not arguments.judge_load:
        rate = JUDGE_SHARE * gpu.flops / (2 * JUDGE_PARAMETERS * JUDGE_TOKENS)
        return rate, "predicted; benchmarks/judge_load.py measures it"
    try:
        rows = json.loads(arguments.judge_load.read_text(encoding="utf-8"))["targets"]
        known = list(dict.fromkeys(row["target"] for row in rows))
        target = arguments.judge_target or (known[0] if len(known) == 1 else None)
        if target not in known:
            raise plan.PlanError(
                f"--judge_load {arguments.judge_load} has the servers {', '.join(known)}: choose one with --judge_target"
            )
        rate = max(row["pairs_per_second"] for row in rows if row["target"] == target)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise plan.PlanError(
            f"--judge_load {arguments.judge_load} is no report of judge_load.py ({type(error).__name__}: {error})"
        ) from error
    return rate / arguments.judge_gpus, "measured"


def read_run(path: Path) -> dict[str, Any]:
    """Median seconds of a run's epochs (its first warms up), or of a report of benchmarks/epoch.py.

    Returns:
        ``work``: parts of a ``plan.Workload``; ``times`` of an epoch; ``processes``.

    Raises:
        PlanError: A file or its training epochs are missing.
    """
    names = ("sample", "reward_wait", "train", "epoch")
    try:
        if path.is_dir():
            saved = json.loads((path / "plan.json").read_text(encoding="utf-8"))
            rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            rows = [row for row in rows if row.get("phase") == "train" and "time/epoch_s" in row]
            times = {name: statistics.median(row[f"time/{name}_s"] for row in rows[1:] or rows) for name in names}
        else:
            (result,) = json.loads(path.read_text(encoding="utf-8"))["results"]
            saved, theirs = result["plan"], ("sampling", "reward_wait", "training", "epoch")
            times = {name: result["seconds"][their]["median"] for name, their in zip(names, theirs, strict=True)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise plan.PlanError(
            f"--run {path}: {type(error).__name__}: {error}. Give the folder of a run with a finished training epoch "
            "(metrics.jsonl, plan.json), or a report of benchmarks/epoch.py."
        ) from error
    share = saved["samples"] / saved["num_processes"]
    work = {
        "images": saved["samples"],
        "batch_size": saved["sample_batch_size"],
        "sample_seconds": times["sample"] / share,
        "train_seconds": times["train"] / share,
        "other_seconds": max(0.0, times["epoch"] - times["sample"] - times["reward_wait"] - times["train"]),
    }
    return {"work": work, "times": times, "processes": saved["num_processes"]}


def compared(own: plan.Workload, rehearsed: plan.Workload | None, measured: dict[str, Any], serving: int) -> str:
    """Measured seconds of a run beside the predicted: of its work from a rehearsal, of its waiting from its own seconds."""
    split, times = plan.predict(own, measured["processes"], serving), measured["times"]
    rows = [("wait for rewards", split.wait, times["reward_wait"]), ("epoch", split.epoch, times["epoch"])]
    if rehearsed:
        share = own.images / measured["processes"]
        rows.append(("sampling, rehearsed", rehearsed.sample_seconds * share, times["sample"]))
        rows.append(("training, rehearsed", rehearsed.train_seconds * share, times["train"]))
    lines = [f"\n{'':<20} {'predicted':>9} {'measured':>9}"]
    lines += [f"{name:<20} {expected:>8.2f}s {real:>8.2f}s" for name, expected, real in rows]
    return "\n".join([*lines, f"epoch: predicted / measured = {split.epoch / times['epoch']:.3f}"])


# --- several configurations -------------------------------------------------------------------------------------------


def table(arguments: argparse.Namespace) -> int:
    """One line for each configuration, on the card of its name's size, else 80 GB."""
    config = ROOT / "config" / "grpo.py"
    names = arguments.table or [n for n in runpy.run_path(str(config))["CONFIGS"] if not n.startswith("toy")]
    cards = {"24gb": "RTX 4090 24GB", "48gb": "L40S 48GB"}
    print(report.SUMMARY)
    status = 0
    for name in names:
        size = re.search(r"\d+gb$", name)
        card = arguments.gpu or cards.get(size.group() if size else "", "H100 80GB")
        found = attempt(load_options(f"{config}:{name}", ()), name, arguments.processes, plan.GPUS[card].memory)
        if found is not None:
            print(report.summary_row(found, plan.GPUS[card], card), flush=True)
        status |= found is None or report.left(found, plan.GPUS[card]) < 0
    return int(status)


def parser() -> argparse.ArgumentParser:
    """The arguments besides those of the configuration."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--gpu", help="a known card, such as 'H200 141GB' (default H100 80GB; an unknown one lists them)")
    made.add_argument("--memory_gb", type=float, help="or its memory alone, as sold")
    made.add_argument("--processes", type=int, default=1, help="GPUs that share an epoch's images")
    made.add_argument("--gpus", type=int, help="GPUs to divide between generator and judge")
    made.add_argument("--gpus_per_judge", type=int, help="GPUs of one copy of the judge (default: as few as hold it)")
    made.add_argument("--pairs", type=float, help="judge questions an image (default: of the configuration's rewards)")
    made.add_argument("--judge_pairs_per_second", type=float, help="of a judge on one GPU")
    made.add_argument("--judge_load", type=Path, help="or judge_load.json of benchmarks/judge_load.py")
    made.add_argument("--judge_target", help="which of its servers, if it has several")
    made.add_argument("--judge_gpus", type=int, default=1, help="GPUs that server had (default 1)")
    made.add_argument(
        "--run", type=Path,
        help="plan from the measured seconds of a run's folder or a report of benchmarks/epoch.py; with --gpu or "
        "--memory_gb, rehearse as well and compare",
    )  # fmt: skip
    made.add_argument(
        "--judge", type=Path, metavar="YAML", help="judge training with this file (key=value overrides it) instead of RL"
    )
    made.add_argument("--judge_pixels", type=int, help="pixels of its images (default: the largest it allows)")
    made.add_argument("--table", nargs="*", metavar="NAME", help="one line for each (default: every configuration)")
    return made


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of the trainer, which is not what the reader asked for
    sys.exit(main())
