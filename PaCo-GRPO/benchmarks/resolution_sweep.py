"""What an image costs at each resolution, sampled and trained on: the curve behind resolution decoupling.

Measured on weights made in place, all resolutions taking turns within each round; and counted, without running, for the
real models (PyTorch counts FLOPs from shapes alone, so 12 B parameters fit a laptop).

    python benchmarks/resolution_sweep.py --preset narrow           # FLUX's token counts at a toy's width, on a CPU
    python benchmarks/resolution_sweep.py --preset flux-dev --batch 4 --train-batch 1 --k 4     # on a GPU
    python benchmarks/resolution_sweep.py --only-counted --counted flux-dev kontext-dev

Any option of config/base.py can follow as --config.a.b=value.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import epoch
from measuring import machine
from measuring.architectures import PRESETS

SIDES = (128, 256, 384, 512, 768, 1024)
SAMPLED_STEPS = 10  # of the counted rollouts, as in the published configurations


def main(given: Sequence[str] | None = None) -> int:
    """Measure and write; exit statuses as of epoch.py."""
    arguments, rest = parser().parse_known_args(given)
    from measuring.turns import is_out_of_memory
    from paco_grpo.training.configuration import ConfigError

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    epoch.quiet()
    rows: list[dict] = []
    try:
        overrides = epoch.overrides_of(rest)
        work = epoch.work_of(arguments).resolved()
        found: dict = {"measured": rows, "peak": None, "device": None}
        if not arguments.only_counted:
            with tempfile.TemporaryDirectory(prefix="paco-benchmark-") as folder:
                found |= measure(arguments, work, overrides, Path(folder))
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return epoch.REFUSED
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print("error: the accelerator's memory is not enough; lower --train-batch or --resolutions", file=sys.stderr)
        return epoch.TOO_LARGE
    found["counted"] = [
        row for name in arguments.counted for row in counted(name, arguments.resolutions, arguments.text)
    ]
    settings = dataclasses.asdict(work) | {"resolutions": arguments.resolutions, "repeats": arguments.repeats}
    made = machine.report("resolution_sweep", settings | {"overrides": dict(overrides)}, **found)
    machine.write(arguments.output, made)
    print(arguments.output)
    return 0


def measure(arguments: argparse.Namespace, work, overrides: list[tuple[str, str]], folder: Path) -> dict:
    """Seconds, FLOPs and tokens of an image at each resolution, and the peak they are compared to."""
    import torch

    from measuring.turns import Turns

    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    sides = "|".join(str(side) for side in arguments.resolutions)
    given = [f"train.resolution={sides}|{arguments.resolutions[0]}"]
    turns = Turns(work, given, overrides, folder, arguments.warmup + arguments.repeats + 2)
    peak = turns.peak()
    epochs = turns.measure(arguments.warmup, arguments.repeats)
    peak = max(peak, turns.peak(), key=lambda each: each["flops_per_second"])
    results = [turns.result(i, each, peak["flops_per_second"]) for i, each in enumerate(epochs)]
    turns.close()
    return {"measured": [of_an_image(each) for each in results], "peak": peak, "device": turns.device.type}


def of_an_image(result: dict) -> dict:
    """A result of ``Turns.result``, divided by its images."""
    images, config = result["plan"]["samples"], result["config"]
    drawn = (config["train"]["resolution"] // result["size_multiple"]) ** 2
    text = max(each["text_tokens"] for each in result["forwards"])
    total = text + max(each["image_tokens"] for each in result["forwards"])
    row = {
        "resolution": config["train"]["resolution"], "images": images, "steps": config["sample"]["num_steps"],
        "image_tokens": drawn, "text_tokens": text, "text_share": text / total,
    }  # fmt: skip
    for phase in ("sampling", "training"):
        row[f"{phase}_seconds"] = {
            key: value / images if key != "n" else value for key, value in result["seconds"][phase].items()
        }
        row[f"{phase}_flops"] = result["flops"][phase] and result["flops"][phase] / images
        row[f"{phase}_mfu"] = result["rates"][f"{phase}_mfu"]
    row["decode_seconds"] = result["detailed_seconds"]["decode"] / images
    return row | {"memory": result["memory"], "epochs": result["epochs"]}


def counted(preset: str, sides: Sequence[int], texts: Sequence[int]) -> list[dict]:
    """FLOPs of one image of ``preset`` at each resolution and text length; nothing is computed, nothing is timed."""
    from measuring.flops import Shape, image_flops, part_flops

    architecture, rows = PRESETS[preset], []
    for side in sides:
        for text in texts:
            shape = Shape(side, side, text, None if architecture.family == "flux" else (side, side))
            flops, parts = image_flops(architecture, shape), part_flops(architecture, shape)
            drawn, reference = shape.image_tokens(16)  # every preset that is counted has 16 pixels a token
            rows.append(
                {
                    "preset": preset, "resolution": side, "image_tokens": drawn, "reference_tokens": reference,
                    "text_tokens": text, "text_share": text / (drawn + reference + text),
                    "forward": flops.forward, "training_forward": flops.training_forward,
                    "training_backward": flops.training_backward, "sampling": SAMPLED_STEPS * flops.forward,
                    "training": flops.training, "decode": parts["decode"], "encode": parts["encode"],
                }
            )  # fmt: skip
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    epoch.add_work(made)
    made.set_defaults(preset="narrow", workload="counting", k=2, m=1, batch=2, train_batch=1)
    made.add_argument("--resolutions", type=int, nargs="+", default=list(SIDES), help="pixels a side")
    made.add_argument("--repeats", type=int, default=3, help="counted rounds")
    made.add_argument("--warmup", type=int, default=1, help="rounds before them")
    real = [name for name in PRESETS if name not in ("tiny", "narrow")]
    made.add_argument("--counted", nargs="*", default=["flux-dev"], choices=real, help="real models to count FLOPs of")
    made.add_argument("--text", type=int, nargs="+", default=[512], help="text tokens of the counted models")
    made.add_argument("--only-counted", action="store_true", help="measure nothing")
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/resolution_sweep.json"))
    return made


if __name__ == "__main__":
    sys.exit(main())
