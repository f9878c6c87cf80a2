"""Time of each phase of an epoch, throughput, memory, and a profiler trace.

    # any configuration and its model
    python benchmarks/epoch.py --config config/grpo.py:toy_t2is
    # FLUX.1-dev's size, no download
    python benchmarks/epoch.py --config config/grpo.py:t2is_80gb --random_weights

The trainer's own epochs run on the configuration's data. Without ``--rewards``, the reward is the
size of the JPEG file, so that no judge is needed. ``--repeats`` epochs follow one that warms up,
and numbers are medians. For several processes start it with torchrun.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PHASES = ("sample", "reward_wait", "train", "epoch")
PARTS = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae.decoder")


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 refused, 3 the GPU's memory is too small."""
    arguments, rest = parser().parse_known_args(words)
    import torch

    from paco_grpo.options import read_options
    from paco_grpo.training.build import USER_ERRORS

    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    try:
        with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as folder:
            options, name = read_options([*rest, *changes(arguments, folder)])
            report = measure(arguments, options, name, folder)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(
            f"error: the GPU's memory is too small; lower the batch sizes ({str(error)[:200]})",
            file=sys.stderr,
        )
        return 3
    if report is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(table(report))
        print(arguments.output)
    return 0


def changes(arguments: argparse.Namespace, folder: str) -> list[str]:
    """Options of a run that only trains."""
    values: dict[str, Any] = {
        "save_dir": f"{folder}/runs",
        "run_name": "run",
        "logging_platform": "none",
        "save_freq": 0,
        "eval_freq": 0,
        "health.probe_images": 0,
        "num_epochs": 1_000_000,
        "max_train_minutes": None,
    }
    if not arguments.rewards:
        values |= {
            "train.reward_fn": {"jpeg_compressibility": 1.0},
            "train.reward_fn_kwargs": {},
            "train.aggregate_fn": None,
            "test.reward_fn": {},
            "test.reward_fn_kwargs": {},
        }
    return [f"--config.{name}={value}" for name, value in values.items()]


def measure(
    arguments: argparse.Namespace, options: Any, name: str, folder: str
) -> dict[str, Any] | None:
    """The report; None on processes other than the main one."""
    import torch

    from paco_grpo.training.build import build_run
    from paco_grpo.training.trainer import Trainer

    loading = contextlib.nullcontext()
    if arguments.random_weights:
        options, loading = random_model(options, Path(folder))
    with loading:
        run = build_run(options, name)
    trainer = Trainer(run)
    device = run.accelerator.device
    is_main_process = run.accelerator.is_main_process
    calls: Counter[str] = Counter()
    handles = count_calls(run.state.policy.pipeline, calls)
    epochs = []
    for index in range(1 + arguments.repeats):
        calls.clear()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        cpu_before = time.process_time()
        trainer.epoch()
        cpu_s = time.process_time() - cpu_before
        metrics = run.metrics.rows("train")[-1] if is_main_process else {}
        figures = {f"{phase}_s": metrics.get(f"time/{phase}_s") for phase in PHASES}
        figures |= {"cpu_s": cpu_s, "images": dict(calls), "metrics": metrics}
        figures["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if device.type == "cuda":
            figures["peak_gpu_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if index > 0:  # the first epoch warms up
            epochs.append(figures)
    for handle in handles:
        handle.remove()
    operations = []
    if arguments.profile:
        trace = arguments.output.with_suffix(".trace.json.gz")
        operations = profile(trainer.epoch, device, trace)
    samples = run.plan.samples
    run.close()
    if not is_main_process:
        return None
    names = [name for name in epochs[0] if name not in ("images", "metrics")]
    medians = {name: statistics.median(figures[name] for figures in epochs) for name in names}
    return {
        "command": " ".join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "name": name,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "processes": run.accelerator.num_processes,
        "samples": samples,
        "images_per_second": samples / medians["epoch_s"],
        "medians": medians,
        "images": epochs[-1]["images"],
        "epochs": epochs,
        "operations": operations,
    }


def random_model(options: Any, folder: Path) -> tuple[Any, Any]:
    """``options`` with a folder of the same architecture, and the context for loading it.

    The context fills the model with random weights.
    """
    from paco_grpo.architectures import KNOWN, random_weights, write

    model = options.pretrained.model
    if model not in KNOWN:
        return options, contextlib.nullcontext()
    pretrained = dataclasses.replace(options.pretrained, model=str(write(model, folder / "model")))
    return dataclasses.replace(options, pretrained=pretrained), random_weights(model)


def count_calls(pipeline: Any, calls: Counter[str]) -> list[Any]:
    """Count the images (texts) that pass through each part of ``pipeline``."""
    handles = []
    for name in PARTS:
        part = pipeline
        for attribute in name.split("."):
            part = getattr(part, attribute, None)

        def count(_module: Any, args: tuple, kwargs: dict, name: str = name) -> None:
            first = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_ids"))
            calls[name] += len(first)

        if part is not None:
            handles.append(part.register_forward_pre_hook(count, with_kwargs=True))
    return handles


def profile(
    epoch: Callable[[], Any], device: Any, trace: Path, rows: int = 20
) -> list[dict[str, Any]]:
    """One more epoch under torch.profiler: the operations that take most, in milliseconds.

    ``trace`` is a file for Chrome.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    activities = [ProfilerActivity.CPU]
    time_column = "self_cpu_time_total"
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        time_column = "self_device_time_total"
    trace.parent.mkdir(parents=True, exist_ok=True)
    with profiled(activities=activities) as profiler:
        epoch()
    profiler.export_chrome_trace(str(trace))
    operations = []
    for event in profiler.key_averages():
        milliseconds = getattr(event, time_column) / 1000
        operations.append({"name": event.key, "calls": event.count, "ms": milliseconds})
    operations.sort(key=lambda operation: operation["ms"], reverse=True)
    return operations[:rows]


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    what = f"{report['name']}: {report['samples']} images on {report['processes']} process(es)"
    lines = [f"{what}, {report['images_per_second']:.2f} a second"]
    for name, value in report["medians"].items():
        lines.append(f"{name:<14} {value:>10.2f}")
    for part, number in report["images"].items():
        lines.append(f"{number:>8} through {part}")
    for row in report["operations"]:
        lines.append(f"{row['ms']:>10.1f} ms {row['calls']:>7} x {row['name'][:80]}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The arguments of this program; all others are options of the run."""
    style = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=style, allow_abbrev=False
    )
    options.add_argument(
        "--random_weights", action="store_true", help="the real architecture with random weights"
    )
    options.add_argument(
        "--rewards", action="store_true", help="score with the configuration's own rewards"
    )
    options.add_argument("--repeats", type=int, default=3, help="measured epochs")
    options.add_argument(
        "--profile", action="store_true", help="one more epoch under torch.profiler"
    )
    options.add_argument("--output", type=Path, default=Path("benchmarks/results/epoch.json"))
    return options


if __name__ == "__main__":
    sys.exit(main())
