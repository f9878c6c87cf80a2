"""Will a configuration run and fit, and how long will an epoch take? Answered without weights or a GPU, in about a minute.

    python scripts/rehearse.py --config config/grpo.py:t2is --gpu "H100 80GB" --processes 8
    python scripts/rehearse.py --config config/grpo.py:t2is_24gb --memory_gb 24 --config.train.batch_size=2
    python scripts/rehearse.py --config config/grpo.py:t2is --gpus 8        # how many of them should serve the judge?
    python scripts/rehearse.py --run runs/NAME --config runs/NAME/config.yaml --gpus 8 --judge_load judge_load.json
    python scripts/rehearse.py --table t2is t2is_80gb t2is_48gb             # one line each, on the card each is made for

The trainer's own code runs one small epoch, an evaluation and a checkpoint at the model's real shapes on a GPU that computes
nothing (paco_grpo/rehearsal/fake_gpu.py). Whatever a GPU would refuse is an error here, with its place: tensors on two
devices, data types that do not go together under CUDA's autocast, wrong shapes. Kernels, bytes, FLOPs and live memory are
counted and scaled to a whole epoch. Seconds are predictions from the GPU's data sheet.

The shapes of FLUX.1-dev, FLUX.1-Kontext-dev and Qwen-Image-Edit are known here; any local pipeline folder works too.
Exit status: 0 = runs and fits; 1 = does not fit, or the code failed; 2 = a wrong option.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACES = str(ROOT / "paco_grpo"), str(ROOT / "config")
# Options that save memory, in the order of what they cost; each is tried with those before it.
REMEDIES = (
    {"sample.batch_size": "1", "train.batch_size": "1", "test.batch_size": "1"},
    {"speed.offload_vae": "true"},
    {"rewards": "cpu"},
    {"enable_gradient_checkpointing": "true"},
    {"pretrained.quantize": "nf4", "sample.merge_lora": "false", "speed.compile": "false"},
)
JUDGE_TOKENS, JUDGE_PARAMETERS, JUDGE_SHARE = (
    300,
    8.3e9,
    0.3,
)  # of a pair's prompt; of Qwen2.5-VL-7B; of the stated FLOPS


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    arguments, rest = parser().parse_known_args(given)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from paco_grpo.options import ConfigError, read_options
    from paco_grpo.policies import PolicyLoadError
    from paco_grpo.rehearsal import plan, report
    from paco_grpo.rehearsal.models import UnknownModelError

    try:
        gpu_name, gpu = chosen_gpu(arguments, plan)
        if arguments.table:
            return table(arguments.table, arguments.processes, plan, report)
        options, name = read_options(rest)
        processes = arguments.processes
        if arguments.gpus:
            processes = max(1, arguments.gpus - arguments.gpus_per_judge)
        found = run(options, name, processes, gpu.memory)
        if found is None:
            return 1
        print(report.text(found, gpu, gpu_name))
        rate, source = judge_rate(arguments, gpu)
        pairs = pairs_of(options)
        measured = read_run(arguments.run) if arguments.run else None
        work = report.workload(found, gpu, pairs, rate)
        if measured:
            print(compared(work, measured, pairs, arguments, plan))
            work = dataclasses.replace(work, **measured["work"])
        if pairs:
            print(f"\n{pairs:.1f} judge pairs an image; a judge answers {rate:.0f} pairs a second and GPU ({source})")
        if arguments.gpus:
            print(report.split_table(plan.splits(work, arguments.gpus, arguments.gpus_per_judge)))
    except (ConfigError, UnknownModelError, PolicyLoadError, plan.PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report.left(found, gpu) >= 0:
        return 0
    print(remedies(options, name, processes, gpu, gpu_name, report))
    return 1


def chosen_gpu(arguments: argparse.Namespace, plan: Any) -> tuple[str, Any]:
    """Name and numbers of the card."""
    if arguments.memory_gb:
        return f"a card of {arguments.memory_gb:g} GB", plan.gpu_with(arguments.memory_gb)
    if arguments.gpu not in plan.GPUS:
        raise plan.PlanError(
            f"--gpu {arguments.gpu!r} is not known: one of {', '.join(plan.GPUS)}, or give --memory_gb"
        )
    return arguments.gpu, plan.GPUS[arguments.gpu]


def run(options: Any, name: str, processes: int, memory: int) -> Any:
    """The rehearsal; None after printing an error of the code and its place."""
    from paco_grpo.options import ConfigError
    from paco_grpo.policies import PolicyLoadError
    from paco_grpo.rehearsal.epoch import rehearse
    from paco_grpo.rehearsal.models import UnknownModelError

    try:
        return rehearse(options, name, processes, memory)
    except (ConfigError, PolicyLoadError, UnknownModelError):
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PLACES)]
        frames = [f for f in frames if "rehearsal" not in Path(f.filename).parts]
        where = (
            f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}: {frames[-1].line}" if frames else "?"
        )
        print(f"fails on a GPU: {type(error).__name__}: {error}\n  at {where}", file=sys.stderr)
        logging.getLogger(__name__).debug("", exc_info=error)
        return None


def remedies(options: Any, name: str, processes: int, gpu: Any, gpu_name: str, report: Any) -> str:
    """What to change so that it fits: each remedy was rehearsed."""
    overrides: dict[str, str] = {}
    for remedy in REMEDIES:
        changed = with_remedy(options, remedy)
        if changed == options:
            continue
        options = changed
        overrides |= remedy
        found = run(options, name, processes, gpu.memory)
        if found is not None and report.left(found, gpu) >= 0:
            spare = report.left(found, gpu) / 2**30
            return f"it fits with {shown(overrides)} ({spare:.1f} GiB left)"
    return f"it does not fit on {gpu_name} with {shown(overrides)} either: shard it (train.sharding=fsdp2) or take a larger GPU"


def shown(overrides: dict[str, str]) -> str:
    """Overrides as they are given on the command line."""
    names = {k: v for k, v in overrides.items() if k != "rewards"}
    texts = [f"--config.{k}={v}" for k, v in names.items()]
    if "rewards" in overrides:
        texts.append('the CLIP rewards on the CPU (config.train.reward_fn_kwargs: {"device": "cpu"})')
    return " ".join(texts)


def with_remedy(options: Any, remedy: dict[str, str]) -> Any:
    """``options`` with the overrides of one remedy."""
    from paco_grpo.rehearsal.epoch import REWARD_PARAMETERS

    for name, value in remedy.items():
        if name == "rewards":
            kwargs = dict(options.train.reward_fn_kwargs)
            for reward in {*options.train.reward_fn, *options.test.reward_fn} & REWARD_PARAMETERS.keys():
                kwargs[reward] = kwargs.get(reward, {}) | {"device": "cpu"}
            options = dataclasses.replace(options, train=dataclasses.replace(options.train, reward_fn_kwargs=kwargs))
            continue
        group, _, key = name.rpartition(".")
        parsed: Any = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
        if group:
            options = dataclasses.replace(
                options, **{group: dataclasses.replace(getattr(options, group), **{key: parsed})}
            )
        else:
            options = dataclasses.replace(options, **{key: parsed})
    return options


# --- the judge --------------------------------------------------------------------------------------------------------


def pairs_of(options: Any) -> float:
    """Judge questions about an image: pairs of sub-figures of the prompts' layouts, two for an edit, 0 without a judge."""
    names = set(options.train.reward_fn)
    if "consistency_for_editing" in names:
        return 2
    if "consistency_score" not in names:
        return 0
    from paco_grpo.rehearsal.models import t2is_prompts
    from paco_judge.grid import split_prompt

    counts = [(grid.rows * grid.cols) for grid in map(split_prompt, t2is_prompts())]
    return sum(n * (n - 1) / 2 for n in counts) / len(counts)


def judge_rate(arguments: argparse.Namespace, gpu: Any) -> tuple[float, str]:
    """Pairs a second of a judge on one GPU, and where the number comes from."""
    from paco_grpo.rehearsal.plan import PlanError

    if arguments.judge_pairs_per_second:
        return arguments.judge_pairs_per_second, "given"
    if not arguments.judge_load:
        return JUDGE_SHARE * gpu.flops / (
            2 * JUDGE_PARAMETERS * JUDGE_TOKENS
        ), "predicted; measure: benchmarks/judge_load.py"
    try:
        rows = json.loads(arguments.judge_load.read_text(encoding="utf-8"))["targets"]
        known = list(dict.fromkeys(row["target"] for row in rows))
        target = arguments.judge_target or (known[0] if len(known) == 1 else None)
        if target not in known:
            raise PlanError(
                f"--judge_load {arguments.judge_load} has the servers {', '.join(known)}: choose one with --judge_target"
            )
        rate = max(row["pairs_per_second"] for row in rows if row["target"] == target)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise PlanError(
            f"--judge_load {arguments.judge_load} is no report of judge_load.py ({type(error).__name__}: {error})"
        ) from error
    return rate / arguments.judge_gpus, "measured"


def read_run(folder: Path) -> dict[str, Any]:
    """Median seconds of a run's epochs (its first warms up), as parts of a ``Workload``.

    Raises:
        PlanError: A file or its training epochs are missing.
    """
    import statistics

    from paco_grpo.rehearsal.plan import PlanError

    try:
        saved = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
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
    share = saved["samples"] / saved["num_processes"]
    work = {
        "images": saved["samples"],
        "batch_size": saved["sample_batch_size"],
        "sample_seconds": times["sample"] / share,
        "train_seconds": times["train"] / share,
        "other_seconds": max(0.0, times["epoch"] - times["sample"] - times["reward_wait"] - times["train"]),
    }
    return {"work": work, "times": times, "processes": saved["num_processes"]}


def compared(work: Any, measured: dict[str, Any], pairs: float, arguments: argparse.Namespace, plan: Any) -> str:
    """Predicted and measured seconds of the run: from the data sheet, and of its waiting from its own seconds."""
    own = dataclasses.replace(work, **measured["work"])
    split = plan.predict(own, measured["processes"], arguments.judge_gpus if pairs else 0)
    times = measured["times"]
    share = own.images / measured["processes"]
    rows = [
        ("sampling", work.sample_seconds * share, times["sample"]),
        ("training", work.train_seconds * share, times["train"]),
        ("wait for rewards, from its own seconds", split.wait, times["reward_wait"]),
        ("epoch, from its own seconds", split.epoch, times["epoch"]),
    ]
    lines = [f"\n{'':<40} {'predicted':>9} {'measured':>9}"]
    lines += [f"{name:<40} {expected:>8.2f}s {real:>8.2f}s" for name, expected, real in rows]
    return "\n".join([*lines, f"epoch: predicted / measured = {split.epoch / times['epoch']:.3f}"])


# --- several configurations -------------------------------------------------------------------------------------------


def table(names: Sequence[str], processes: int, plan: Any, report: Any) -> int:
    """One line for each named configuration, on the smallest card of its name's size, else 80 GB."""
    from paco_grpo.options import load_options

    cards = {"24gb": "RTX 4090 24GB", "48gb": "L40S 48GB"}
    print(
        "| configuration | resident, GiB | peak, GiB | fits | PFLOP an epoch and GPU | s an epoch |\n|---|--:|--:|---|--:|--:|"
    )
    status = 0
    for name in names:
        size = re.search(r"\d+gb$", name)
        gpu_name = cards.get(size.group() if size else "", "H100 80GB")
        found = run(
            load_options(f"{ROOT / 'config' / 'grpo.py'}:{name}", ()), name, processes, plan.GPUS[gpu_name].memory
        )
        if found is None:
            status = 1
            continue
        print(report.summary_row(found, plan.GPUS[gpu_name], gpu_name), flush=True)
        status |= report.left(found, plan.GPUS[gpu_name]) < 0
    return int(status)


def parser() -> argparse.ArgumentParser:
    """The arguments besides those of the configuration."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument(
        "--gpu", default="H100 80GB", help="a known card, such as 'H200 141GB' (an unknown one lists them)"
    )
    made.add_argument("--memory_gb", type=float, help="or its memory alone, as sold")
    made.add_argument("--processes", type=int, default=1, help="GPUs that share an epoch's images")
    made.add_argument("--gpus", type=int, help="GPUs to divide between generator and judge")
    made.add_argument("--gpus_per_judge", type=int, default=1, help="GPUs of one copy of the judge (tensor parallel)")
    made.add_argument("--judge_pairs_per_second", type=float, help="of a judge on one GPU")
    made.add_argument("--judge_load", type=Path, help="or judge_load.json of benchmarks/judge_load.py")
    made.add_argument("--judge_target", help="which of its servers, if it has several")
    made.add_argument("--judge_gpus", type=int, default=1, help="GPUs that server had (default 1)")
    made.add_argument(
        "--run", type=Path, help="a run's folder: its measured seconds beside the predicted, and for --gpus"
    )
    made.add_argument("--table", nargs="+", metavar="NAME", help="one line for each of these configurations")
    return made


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of the trainer, which is not what the reader asked for
    sys.exit(main())
