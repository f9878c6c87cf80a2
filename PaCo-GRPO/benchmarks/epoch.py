"""One epoch of training (encoding, sampling, decoding, rewards, update), timed and counted, without any download.

    python benchmarks/epoch.py --preset toy                                               # a trained toy, on a CPU
    python benchmarks/epoch.py --preset flux-dev --batch 8 --train-batch 2 --profile      # 12 B, on one GPU
    python benchmarks/epoch.py --preset flux-dev --blocks 0.25 --resolution 256 --config.train.lora_rank=32
    python benchmarks/epoch.py --preset toy --workload config --reward-seconds 0.2        # is the reward hidden?

Any option can follow as --config.a.b=value; sweep.py compares several values. Architectures are the
real ones and weights are random (except the toy's). FLOPs are counted by PyTorch from shapes; MFU is their share of the
fastest large matrix product measured on the same machine.

Workloads: counting = 64 images, 8 prompts, 10 steps, 1 of them trained, PPO, no KL; config = k, m and steps of the
model's own configuration. --published-work repeats what the published implementation computes again in the first: 832
instead of 704 images through the transformer, 256 instead of 8 through each text encoder, 128 instead of 64 through the
decoder. It models the amount of work with our code; it is not the published code.
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
from typing import Any

from measuring import report
from measuring.report import flops, number, share, spread, table

REFUSED, TOO_LARGE = 2, 3  # exit statuses
SECONDS = ("epoch", "sampling", "reward_wait", "training", "cpu", "encode", "denoising", "decode", "optimizer")
# Where an epoch's time goes: phase, and of that the measured parts.
PHASES = {
    "sampling": {"encode": "texts", "denoising": "transformer", "decode": "decoder"},
    "reward_wait": {},
    "training": {"forward": "transformer, forward", "gradient": "backward", "optimizer": "optimizer"},
}
CALLS = {
    "transformer": "transformer, forward", "text_encoder": "first text encoder", "text_encoder_2": "second text encoder",
    "decoder": "VAE decoder", "backward": "transformer, backward",
}  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write; returns the exit status: 0, 2 refused, 3 the accelerator's memory is too small."""
    arguments, overrides = parser().parse_known_args(given)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import diffusers
    import torch
    import transformers

    from paco_grpo.options import ConfigError

    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    # Only errors: that prompts are cut at CLIP's 77 tokens is expected.
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
    try:
        with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as folder:
            found = measure(arguments, overrides, Path(folder))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except torch.OutOfMemoryError as error:
        print(
            "error: the accelerator's memory is too small; lower --batch, --train-batch or --blocks, or add "
            f"--config.enable_gradient_checkpointing=true ({str(error)[:200]})",
            file=sys.stderr,
        )
        return TOO_LARGE
    if found is not None:
        text = tables(found)
        report.write(arguments.output, found, text)
        print(f"{text}\n{arguments.output}")
    return 0


def measure(arguments: argparse.Namespace, overrides: list[str], folder: Path) -> dict[str, Any] | None:
    """The report; None on processes other than the main one."""
    import torch

    from measuring import timing
    from measuring.workload import architecture_of, resolve

    work = resolve(arguments)
    architecture = architecture_of(work)
    meter = build(work, architecture, overrides, folder)
    run, train = meter.run, meter.run.options.train
    peaks, epochs = [timing.matmul_peak(meter.device, run.state.policy.dtype)], []
    for index in range(arguments.warmup + arguments.repeats):
        first_images = arguments.images if index == 0 else None
        epoch = _epoch_with_images(meter, first_images) if first_images else meter.epoch()
        if index >= arguments.warmup:
            epochs.append(epoch)
        if epoch:
            print(f"epoch {index + 1}: {epoch[0]['seconds']['epoch']:.2f} s", file=sys.stderr, flush=True)
    peaks.append(timing.matmul_peak(meter.device, run.state.policy.dtype))
    found = None
    if run.accelerator.is_main_process:
        import yaml

        peak = max(peaks, key=lambda each: each["flops_per_second"])
        sizes = train.resolution, train.lora_rank, run.state.policy.size_multiple
        counted = timing.flops_of(epochs[-1], architecture, *sizes)
        result = {"label": arguments.label, "plan": dataclasses.asdict(run.plan), "size_multiple": run.state.policy.size_multiple}
        result["config"] = yaml.safe_load((run.folder / "config.yaml").read_text())
        result |= timing.result_of(epochs, counted, peak["flops_per_second"])
        parameters = {  # without LoRA
            name: sum(p.numel() for key, p in part.named_parameters() if ".lora_" not in key)
            for name, part in run.state.policy.pipeline.components.items()
            if isinstance(part, torch.nn.Module)
        }
        found = report.header("epoch", vars(work) | {"overrides": overrides}) | {
            "processes": run.accelerator.num_processes, "device": meter.device.type, "peak": peak,
            "parameters": parameters, "results": [result],
        }  # fmt: skip
    meter.close()
    if arguments.profile and found is not None and found["processes"] == 1:
        del meter, run
        gc.collect()  # two 12 B models do not fit
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        small = argparse.Namespace(**vars(work) | {"k": work.batch, "m": 1, "steps": 3, "train_steps": 1})
        meter = build(small, architecture, overrides, folder / "profile")
        meter.epoch()
        trace = arguments.output.parent / "traces" / f"{arguments.output.stem}.json.gz"
        found["profile"] = timing.profile_of(meter, trace)
        meter.close()
    return found


def build(work: argparse.Namespace, architecture, overrides: list[str], folder: Path):
    """The ``EpochMeter`` of a run of ``work`` (resolved)."""
    import torch

    from measuring.timing import EpochMeter
    from measuring.workload import prepare, repeat_published_work
    from paco_grpo.training.build import build_run

    if work.published_work:
        overrides = [*overrides, "--config.speed.offload_text_encoders=false"]
    options, loading = prepare(work, architecture, folder, work.warmup + work.repeats, overrides)
    with loading:
        run = build_run(options, "benchmark")
    meter = EpochMeter(run)
    if work.lora_scale:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in run.state.policy.transformer.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(work.lora_scale * noise.to(parameter))
    if work.published_work:
        repeat_published_work(run)
    return meter


def _epoch_with_images(meter, path: Path) -> list[dict[str, Any]]:
    """Measure an epoch; ``path`` gets its images (n, H, W, 3) as bytes and the mean |ratio − 1| of its update."""
    import numpy as np

    images, decode = [], meter.run.state.policy.decode

    def keeping(*arguments, **keywords):
        found = decode(*arguments, **keywords)
        images.extend(np.asarray(image) for image in found)
        return found

    meter.run.state.policy.decode = keeping
    epoch = meter.epoch()
    meter.run.state.policy.decode = decode
    if epoch:
        path.parent.mkdir(parents=True, exist_ok=True)
        deviation = epoch[0]["metrics"].get("train/ratio_deviation", np.nan)
        np.savez(path, images=np.stack(images), ratio_deviation=deviation)
    return epoch


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> str:
    """Markdown tables of the results (one, or those of a sweep)."""
    results, settings, peak = found["results"], found["settings"], found["peak"]
    work = ", ".join(f"{key} {settings[key]}" for key in ("preset", "resolution", "k", "m", "steps", "batch"))
    labels = [f"`{result['label']}`" for result in results]

    def rows(cells) -> list[list[str]]:
        return [[label, *cells(result)] for label, result in zip(labels, results, strict=True)]

    parts = [f"{work}. Seconds of an epoch, median (quartiles); cpu: of all threads of the main process.\n"]
    parts.append(table(["", *SECONDS], rows(lambda r: [spread(r["seconds"][name]) for name in SECONDS])))
    parts.append("Images (texts) through each part.\n")
    parts.append(table(["", *CALLS.values()], rows(lambda r: [str(r["calls"].get(name, 0)) for name in CALLS])))

    def rates(r: dict[str, Any]) -> list[str]:
        rate, memory = r["rates"], r["memory"]
        cells = [number(rate["sampling_tokens_per_second"])]
        cells += [flops(r["flops"][phase]) for phase in ("sampling", "training")]
        cells += [share(rate[f"{phase}_mfu"]) for phase in ("denoising", "sampling", "training", "epoch")]
        return [*cells, share(rate["reward_hidden"]), number(memory.get("peak_gpu_mib", memory["peak_rss_mib"]) / 1024)]

    threads = f" on {peak['threads']} thread(s)" if peak["threads"] else ""
    peak_flops = flops(peak["flops_per_second"])
    parts.append(f"MFU: share of the measured {peak['dtype']} peak, {peak_flops}FLOP/s{threads}.\n")
    columns = ["", "image tokens/s", "sampling FLOPs", "training FLOPs", "denoising MFU", "sampling MFU", "training MFU",
               "epoch MFU", "reward hidden", "peak GiB"]  # fmt: skip
    parts.append(table(columns, rows(rates)))
    for label, result in zip(labels, results, strict=True):
        parts.append(f"Where the time of {label} goes.\n")
        parts.append(table(["", "s", "share"], _phases({name: s["median"] for name, s in result["seconds"].items()})))
    if found.get("profile"):
        parts.append(f"Operations of {found['profile']['total_ms']:.0f} ms: one batch, 3 steps.\n")
        operations = [
            [f"`{each['name'][:70]}`", str(each["calls"]), number(each["ms"]), share(each["share"])]
            for each in found["profile"]["operations"][:12]
        ]
        parts.append(table(["", "calls", "ms", "share"], operations))
    return "\n".join(parts)


def _phases(seconds: dict[str, float]) -> list[list[str]]:
    """Rows of what an epoch is made of; they sum to it, but for decoding that overlaps."""
    parts: dict[str, float] = {}
    for phase, names in PHASES.items():
        parts |= {f"{phase}: {text}": seconds[name] for name, text in names.items()}
        rest = seconds[phase] - sum(seconds[name] for name in names)
        parts[f"{phase}: the rest" if names else phase.replace("_", " ")] = max(rest, 0.0)
    parts["the rest"] = max(seconds["epoch"] - sum(seconds[phase] for phase in PHASES), 0.0)
    return [[name, number(took), share(took / seconds["epoch"])] for name, took in parts.items()]


def parser() -> argparse.ArgumentParser:
    """The command line, without the options of the configuration."""
    style = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    presets = ("tiny", "toy", "narrow", "flux-small", "flux-dev", "kontext-dev", "qwen-edit")
    made.add_argument("--preset", choices=presets, default="toy", help="the generator")
    made.add_argument("--workload", choices=("counting", "config"), default="counting", help="see above")
    made.add_argument("--published-work", action="store_true", help="see above")
    made.add_argument("--blocks", type=float, default=1.0, help="fraction of the preset's blocks")
    made.add_argument("--width", type=float, default=1.0, help="fraction of the preset's attention heads")
    made.add_argument("--resolution", type=int, help="pixels along a side (default: the model's training resolution)")
    made.add_argument("--k", type=int, help="images per prompt")
    made.add_argument("--m", type=int, help="prompts per epoch")
    made.add_argument("--steps", type=int, help="denoising steps")
    made.add_argument("--train-steps", type=int, help="noisy steps, all trained on")
    made.add_argument("--batch", type=int, default=16, help="images per forward and process in sampling")
    made.add_argument("--train-batch", type=int, default=16, help="images per forward and process in training")
    made.add_argument("--reward-seconds", type=float, help="a reward that waits this long for each image")
    made.add_argument("--judge", metavar="URL", help="a judge server as the reward")
    made.add_argument("--judge-model", default="PaCo-Reward-7B", help="the name it serves")
    made.add_argument("--repeats", type=int, default=5, help="measured epochs")
    made.add_argument("--warmup", type=int, default=1, help="epochs before them")
    made.add_argument("--lora-scale", type=float, default=0.0, help="add noise of this size to the LoRA, as if trained")
    made.add_argument("--images", type=Path, metavar="FILE.npz", help="write the images of the first epoch")
    made.add_argument("--label", default="as configured", help="name in tables")
    made.add_argument("--profile", action="store_true", help="operations of a small epoch, one process: table, trace")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/epoch.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
