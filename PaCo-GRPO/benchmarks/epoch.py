"""One whole epoch (encoding, sampling, decoding, rewards, training) of the trainer's own loop, on weights made in place.

Settings that are compared take turns within each round, in another order each time; ratios are medians of the ratios
within a round. FLOPs are counted by PyTorch from shapes, and the share of the peak (MFU) is of the fastest large
matrix product measured on the same machine.

    python benchmarks/epoch.py --preset toy                         # the counting test's setting, on a CPU
    python benchmarks/epoch.py --preset toy --compare work=published,ours --compare sample.merge_lora=off,on
    python benchmarks/epoch.py --preset flux-dev --batch 8 --train-batch 2 --profile      # 12 B, on one GPU
    python benchmarks/epoch.py --preset flux-dev --blocks 0.25 --resolution 256 --config.train.lora_rank=32
    python benchmarks/epoch.py --preset toy --workload config --reward-seconds 0.2        # is the reward hidden?

Any option of config/base.py can follow as --config.a.b=value. Several processes: torchrun --nproc-per-node N
benchmarks/epoch.py … (see scaling.py). ``tables.py`` turns the JSON into tables and plots.

Workloads: counting = 64 images, 8 prompts, 10 steps, 1 of them trained, PPO, no KL; published = the same epoch with the
work that the published implementation repeats (832 instead of 704 images through the transformer, 256 instead of 8
through each text encoder, 128 instead of 64 through the decoder): a model of that work on our code, not their code;
config = k, m and steps of the model's own configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measuring import machine, workload

REFUSED, TOO_LARGE = 2, 3  # exit statuses


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write; returns the exit status: 0, 2 refused, 3 does not fit into the accelerator's memory."""
    arguments, rest = parser().parse_known_args(given)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    from measuring.turns import is_out_of_memory
    from paco_grpo.training.configuration import ConfigError

    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    quiet()
    try:
        with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as folder:
            overrides = overrides_of(rest)
            found = measure(arguments, overrides, Path(folder))
            if arguments.profile and found is not None and found["processes"] == 1:
                found["profile"] = profile_of(arguments, overrides, Path(folder))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(
            "error: the accelerator's memory is not enough; lower --batch, --train-batch or --blocks, or add "
            f"--config.enable_gradient_checkpointing=true ({str(error)[:200]})",
            file=sys.stderr,
        )
        return TOO_LARGE
    if found is not None:
        machine.write(arguments.output, found)
        print(arguments.output)
    return 0


def measure(arguments: argparse.Namespace, overrides: list[tuple[str, str]], folder: Path) -> dict | None:
    """The report; None on processes other than the main one."""
    from measuring.turns import Turns, compared

    work = work_of(arguments).resolved()
    turns = Turns(work, arguments.compare, overrides, folder, arguments.warmup + arguments.repeats + 2)
    before = turns.peak()
    measured = turns.measure(arguments.warmup, arguments.repeats)
    peak = max(before, turns.peak(), key=lambda each: each["flops_per_second"])
    found = None
    if turns.main:
        results = [turns.result(i, each, peak["flops_per_second"]) for i, each in enumerate(measured)]
        found = machine.report(
            "epoch",
            dataclasses.asdict(work) | {"repeats": arguments.repeats, "warmup": arguments.warmup,
                                        "overrides": dict(overrides)},
            processes=turns.accelerator.num_processes, device=turns.device.type, peak=peak,
            parameters=parameters(turns.watched[0].run.policy.pipeline),
            results=results, compared=compared(turns.pairs, measured),
        )  # fmt: skip
    turns.close()
    return found


def profile_of(arguments: argparse.Namespace, overrides: list[tuple[str, str]], folder: Path) -> dict:
    """Kernels of an epoch of one batch and three steps."""
    import torch

    from measuring.profiling import profiled
    from measuring.turns import Turns

    gc.collect()  # what was measured before is in cycles of hooks; two 12 B models at once are too much
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    small = dataclasses.replace(work_of(arguments).resolved(), k=arguments.batch, m=1, steps=3, train_steps=1)
    turns = Turns(small, [], overrides, folder / "profile", 3)
    turns.watched[0].epoch()
    trace = arguments.output.parent / "traces" / f"{arguments.output.stem}.json.gz"
    found = profiled(turns.watched[0], trace)
    turns.close()
    return found


def parameters(pipeline) -> dict[str, int]:
    """Number of base weights of each part (without LoRA)."""
    import torch

    return {
        name: sum(p.numel() for key, p in part.named_parameters() if ".lora_" not in key)
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }


def work_of(arguments: argparse.Namespace) -> workload.Workload:
    """The settings that a command line stands for."""
    names = {field.name for field in dataclasses.fields(workload.Workload)} - {"name"}
    return workload.Workload(name=arguments.workload, **{name: getattr(arguments, name) for name in names})


def overrides_of(rest: Sequence[str]) -> list[tuple[str, str]]:
    """Options of the configuration among the arguments.

    Raises:
        ConfigError: Something else is among them.
    """
    from paco_grpo.training.configuration import parse_command_line

    return parse_command_line(["--config", "benchmark", *rest])[1]


def quiet() -> None:
    """Warnings of the libraries alone; prompts cut at CLIP's 77 tokens are meant to be."""
    import diffusers
    import transformers

    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_work(made)
    made.add_argument("--workload", choices=workload.WORKLOADS, default="counting", help="see above")
    made.add_argument("--repeats", type=int, default=5, help="counted rounds")
    made.add_argument("--warmup", type=int, default=1, help="rounds before them")
    made.add_argument(
        "--compare", action="append", default=[], metavar="KEY=BASE,OTHER",
        help="an option of the configuration (on/off for switches; KEY+KEY for several at once), or work=published,ours; "
        "may be repeated",
    )  # fmt: skip
    made.add_argument(
        "--profile", action="store_true", help="kernels of one small epoch: a table and a trace (one process)"
    )
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/epoch.json"))
    return made


def add_work(made: argparse.ArgumentParser) -> None:
    """The options that ``work_of`` reads."""
    made.add_argument("--preset", choices=workload.RESOLUTIONS, default="toy", help="the generator")
    made.add_argument("--blocks", type=float, default=1.0, help="fraction of the preset's blocks")
    made.add_argument("--width", type=float, default=1.0, help="fraction of the preset's attention heads")
    made.add_argument("--resolution", type=int, help="pixels a side (default: the model's training resolution)")
    made.add_argument("--k", type=int, help="images a prompt")
    made.add_argument("--m", type=int, help="prompts an epoch")
    made.add_argument("--steps", type=int, help="denoising steps")
    made.add_argument("--train-steps", type=int, help="noisy steps, all trained on")
    made.add_argument("--batch", type=int, default=16, help="images a rollout forward (and process)")
    made.add_argument("--train-batch", type=int, default=16, help="images a training forward (and process)")
    made.add_argument("--reward-seconds", type=float, help="a reward that waits so long for each image")
    made.add_argument("--judge", metavar="URL", help="ask this judge for the consistency score")
    made.add_argument("--judge-model", default="PaCo-Reward-7B", help="the name it serves")


if __name__ == "__main__":
    sys.exit(main())
