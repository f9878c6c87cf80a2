"""Builds the toy base models from a seed, in about 80 minutes on 2 cores.

    flux/         a FluxPipeline folder (VAE, transformer, two text encoders), bfloat16
    judge/        a Qwen2.5-VL folder with processor and chat template
    quality.json  measured by the oracle and on captions

VAE and judge are trained at the same time, on one core each; then the generator on both cores. Times are wall-clock, so
another machine gives other weights of the same kind.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from toy_models.panels import LatentCache, PanelCache
from toy_models.quality import generator_quality, record_quality

logger = logging.getLogger(__name__)

MINUTES = {"vae": 6.0, "judge": 20.0, "generator": 56.0}


def _panels(seed: int) -> dict[int, PanelCache]:
    return {side: PanelCache(side, 4, seed) for side in (16, 32, 64)}  # grids of 32, 64 and 128 px


def build_vae(out: Path, minutes: float, seed: int) -> None:
    """The VAE."""
    from toy_models.vae import train_vae

    train_vae(_panels(seed), 60 * minutes, seed).save_pretrained(out / "flux" / "vae")


def build_judge(out: Path, minutes: float, seed: int) -> None:
    """The judge's base, captions first and then also comparisons, and its caption accuracy. Continues from one in ``out``."""
    from toy_models import judge

    panels, folder = _panels(seed), out / "judge"
    if (folder / "config.json").exists():
        processor, model = judge.load_judge(folder)
        batches, first_leg = judge.CaptionBatches(processor, panels, seed + 1), 0.0
    else:
        processor = judge.new_processor()
        model = judge.new_judge(processor, seed)
        batches, first_leg = judge.CaptionBatches(processor, panels, seed), 0.45
        judge.train_judge(model, batches, 60 * minutes * first_leg)
    batches.comparisons = True
    judge.train_judge(model, batches, 60 * minutes * (1 - first_leg))
    # float32: LLaMA-Factory computes in the dtype it finds, and bfloat16 is slow on most CPUs.
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    figures = {"caption_accuracy": judge.caption_accuracy(model, batches), "parameters": sum(p.numel() for p in model.parameters())}
    logger.info("judge: caption accuracy on single panels %.3f", figures["caption_accuracy"])
    record_quality(out / "quality.json", {"judge": figures})


def build_generator(out: Path, minutes: float, seed: int) -> None:
    """Text encoders and transformer around the VAE in ``out``, on any number of torchrun processes. Continues from a pipeline in ``out``."""
    from diffusers import AutoencoderKL, FluxPipeline

    from toy_models import flux
    from toy_models.vae import flux_latents

    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    folder = out / "flux"
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    latents = LatentCache(flux_latents(vae), _panels(seed), seed)
    if (folder / "model_index.json").exists():
        pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
        options = {"seed": seed + 1, "early_share": 0.0, "lr": 6e-4}
    else:
        pipe, options = flux.new_pipeline(vae, seed), {"seed": seed}
    flux.train_generator(
        pipe, latents, 60 * minutes, snapshot=lambda: pipe.save_pretrained(out.parent / "flux-snapshot"), **options
    )
    if int(os.environ.get("RANK", "0")) == 0:
        pipe.to(torch.bfloat16).save_pretrained(folder)


def measure_generator(out: Path, minutes: float, seed: int) -> None:
    """Quality of the base's images."""
    record_quality(out / "quality.json", {"generator": generator_quality(out / "flux", seed)})


STAGES = {"vae": build_vae, "judge": build_judge, "generator": build_generator, "measure": measure_generator}


def _start(stage: str, out: Path, arguments: argparse.Namespace) -> subprocess.Popen:
    launcher = [sys.executable]
    if stage == "generator" and arguments.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.processes}"]
    longer = {"judge": arguments.continue_judge, "generator": arguments.continue_generator}
    minutes = (longer.get(stage) or MINUTES.get(stage, 0)) * arguments.scale
    command = [*launcher, "-m", "toy_models.build_models", "--stage", stage, "--out", out, "--seed", arguments.seed]
    return subprocess.Popen([*map(str, command), "--minutes", str(minutes)], env={**os.environ, "OMP_NUM_THREADS": "1"})


def build_all(arguments: argparse.Namespace) -> None:
    """All stages; the new folders replace the old ones only when every stage has succeeded."""
    final = arguments.out.resolve()
    if arguments.continue_generator:
        order = (("generator",), ("measure",))
    elif arguments.continue_judge:
        order = (("judge",),)
    else:
        order = (("vae", "judge"), ("generator",), ("measure",))
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".building-") as workplace:
        out = Path(workplace) / "models"
        if arguments.continue_generator or arguments.continue_judge:
            shutil.copytree(final, out)
        else:
            out.mkdir()
        for stages in order:
            running = {stage: _start(stage, out, arguments) for stage in stages}
            failed = [stage for stage, process in running.items() if process.wait() != 0]
            if failed:
                raise SystemExit(f"building stopped: {', '.join(failed)} failed; see above")
        forget_paths(out)
        if final.exists():
            final.rename(Path(workplace) / "replaced")
        out.rename(final)


def forget_paths(out: Path) -> None:
    """Removes the folders in which weights were built from the JSON files."""
    for path in (*out.rglob("config.json"), *out.rglob("model_index.json")):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that will hold flux/ and judge/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every training time, e.g. 0.05 for a test")
    parser.add_argument("--processes", type=int, default=2, help="processes (of one thread) for the generator")
    for name in ("generator", "judge"):
        parser.add_argument(
            f"--continue-{name}", type=float, metavar="MINUTES",
            help=f"only train the {name} in --out longer, with a new learning rate schedule",
        )  # fmt: skip
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    torch.set_num_threads(1)
    if arguments.stage:
        STAGES[arguments.stage](arguments.out, arguments.minutes, arguments.seed)
    else:
        build_all(arguments)


if __name__ == "__main__":
    main()
