"""Builds the toy base models from seeds: `python -m paco_toy.build_models --out quickstart/models` (about 80 minutes on 2 cores).

    flux/         a FluxPipeline folder (VAE, transformer, two text encoders), bfloat16
    judge/        a Qwen2.5-VL folder with processor and chat template, bfloat16
    build.log     what was printed
    quality.json  what was measured, by the oracle and on captions

VAE and judge are trained side by side, one core each; then the generator on both cores. Times are wall-clock, so another
machine gives other weights of the same kind. `--continue-generator 40` trains the generator that is already in the folder for
40 more minutes, with a learning rate that starts afresh, and leaves VAE and judge as they are; `--continue-judge` likewise.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from paco_toy.bases.panels import PanelCache

logger = logging.getLogger(__name__)

LEARNING_RATE_LATER = 6e-4  # of a generator that is trained on
MINUTES = {"vae": 6.0, "judge": 20.0, "generator": 56.0}
SIDES = (16, 32, 64)  # panel sides in pixels: grids of 32, 64 and 128 px


def build_panels(out: Path, minutes: float, seed: int) -> None:
    """Stage: renders every character in every view, four jitters each."""
    for side in SIDES:
        PanelCache(side, 4, seed).save(out.parent / f"panels_{side}.npy")


def _panels(out: Path) -> dict[int, PanelCache]:
    return {side: PanelCache.load(out.parent / f"panels_{side}.npy") for side in SIDES}


def build_vae(out: Path, minutes: float, seed: int) -> None:
    """Stage: the VAE, and the latents of everything it will be asked for."""
    from paco_toy.bases.generator import LatentCache, flux_latents
    from paco_toy.bases.vae import train_vae

    panels = _panels(out)
    vae = train_vae(panels, 60 * minutes, seed)
    vae.save_pretrained(out / "flux" / "vae")
    LatentCache(flux_latents(vae), panels, seed).save(out.parent / "latents.safetensors")


def build_judge(out: Path, minutes: float, seed: int) -> None:
    """Stage: the judge's base, captions first and then also what two images have in common, and its caption accuracy."""
    from paco_toy.bases import judge

    if (out / "judge" / "config.json").exists():  # --continue-judge
        processor, model = judge.load_judge(out / "judge")
        batches = judge.CaptionBatches(processor, _panels(out), seed + 1)
        first_leg = 0.0
    else:
        processor = judge.new_processor()
        model = judge.new_judge(processor, seed)
        batches = judge.CaptionBatches(processor, _panels(out), seed)
        first_leg = 0.45
        judge.train_judge(model, batches, 60 * minutes * first_leg)
    batches.comparisons = True
    judge.train_judge(model, batches, 60 * minutes * (1 - first_leg))
    # float32: LLaMA-Factory computes in the dtype it finds, and bfloat16 is slow on most CPUs.
    model.save_pretrained(out / "judge")
    processor.save_pretrained(out / "judge")
    accuracy = judge.caption_accuracy(model, processor, batches)
    logger.info("judge: caption accuracy on single panels %.3f", accuracy)
    _note_quality(
        out, {"judge": {"caption_accuracy": accuracy, "parameters": sum(p.numel() for p in model.parameters())}}
    )


def build_generator(out: Path, minutes: float, seed: int) -> None:
    """Stage: text encoders and transformer around the finished VAE; runs under torchrun on as many processes as it likes."""
    from diffusers import AutoencoderKL, FluxPipeline

    from paco_toy.bases import generator

    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    vae = AutoencoderKL.from_pretrained(out / "flux" / "vae", torch_dtype=torch.float32)
    latents = generator.LatentCache.load(out.parent / "latents.safetensors")
    if (out / "flux" / "model_index.json").exists():  # --continue-generator
        pipe = FluxPipeline.from_pretrained(out / "flux", torch_dtype=torch.float32)
        options = {"seed": seed + 1, "early_share": 0.0, "lr": LEARNING_RATE_LATER}
    else:
        pipe = generator.new_pipeline(vae, seed)
        generator.pretrain_text(pipe, seed)
        options = {"seed": seed}
    snapshots = out.parent / "flux-snapshot"
    pipe = generator.train_generator(pipe, latents, 60 * minutes, snapshot=lambda look: look.save_pretrained(snapshots), **options)
    if int(os.environ.get("RANK", "0")) == 0:
        pipe.to(torch.bfloat16).save_pretrained(out / "flux")


def encode_latents(out: Path, minutes: float, seed: int) -> None:
    """Stage of --continue-generator: the latents again, from the VAE in the folder."""
    from diffusers import AutoencoderKL

    from paco_toy.bases.generator import LatentCache, flux_latents

    vae = AutoencoderKL.from_pretrained(out / "flux" / "vae", torch_dtype=torch.float32)
    LatentCache(flux_latents(vae), _panels(out), seed).save(out.parent / "latents.safetensors")


def measure_generator(out: Path, seed: int) -> None:
    """Stage: what the base draws, read by the oracle, through diffusers' own FluxPipeline."""
    from paco_toy.bases.quality import generator_quality

    quality = generator_quality(out / "flux", seed)
    for size, figures in quality.items():
        logger.info("generator at %s: %s", size, " ".join(f"{k} {v:.3f}" for k, v in figures.items()))
    _note_quality(out, {"generator": quality})


def _note_quality(out: Path, figures: dict) -> None:
    path = out / "quality.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, **figures}, indent=2) + "\n")


STAGES = {
    "panels": build_panels, "vae": build_vae, "judge": build_judge, "latents": encode_latents, "generator": build_generator,
}  # fmt: skip


def _start(stage: str, arguments: argparse.Namespace, processes: int = 1) -> subprocess.Popen:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    longer = {"judge": arguments.continue_judge, "generator": arguments.continue_generator}
    minutes = (longer.get(stage) or MINUTES.get(stage, 0)) * arguments.scale
    command = [*launcher, "-m", "paco_toy.build_models", "--stage", stage, "--out", str(arguments.out)]
    command += ["--seed", str(arguments.seed), "--minutes", str(minutes)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def build_all(arguments: argparse.Namespace) -> None:
    """All stages; the new folders replace the old ones only when every stage has ended well."""
    final = arguments.out
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".building-") as workplace:
        arguments.out = Path(workplace) / "models"
        if arguments.continue_generator or arguments.continue_judge:
            shutil.copytree(final, arguments.out)
        else:
            arguments.out.mkdir()
        if arguments.continue_generator:
            order = (("panels",), ("latents",), ("generator",), ("measure",))
        elif arguments.continue_judge:
            order = (("panels",), ("judge",))
        else:
            order = (("panels",), ("vae", "judge"), ("generator",), ("measure",))
        for stages in order:
            running = {s: _start(s, arguments, arguments.processes if s == "generator" else 1) for s in stages}
            failed = [s for s, process in running.items() if process.wait() != 0]
            if failed:
                raise SystemExit(f"building stopped: {', '.join(failed)} failed; see above")
        forget_paths(arguments.out)
        if final.exists():
            final.rename(Path(workplace) / "replaced")
        arguments.out.rename(final)


def forget_paths(out: Path) -> None:
    """Takes out of the JSON files where the weights lay while they were built."""
    for path in (*out.rglob("config.json"), *out.rglob("model_index.json")):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that will hold flux/ and judge/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every training time, e.g. 0.05 for a try")
    parser.add_argument("--processes", type=int, default=2, help="processes (of one thread) for the generator")
    parser.add_argument(
        "--continue-generator", type=float, metavar="MINUTES", help="train the generator in --out longer, nothing else"
    )
    parser.add_argument(
        "--continue-judge", type=float, metavar="MINUTES", help="train the judge's base in --out longer, nothing else"
    )
    parser.add_argument("--stage", choices=[*STAGES, "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    if arguments.stage is None:
        build_all(arguments)
        return
    torch.set_num_threads(1)
    if arguments.stage == "measure":
        measure_generator(arguments.out, arguments.seed)
    else:
        STAGES[arguments.stage](arguments.out, arguments.minutes, arguments.seed)


if __name__ == "__main__":
    main()
