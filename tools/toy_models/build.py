"""Builds toy models from a seed, into a folder that holds all of them. Without a name: the base models, in about 80 minutes.

    judge               a Qwen2.5-VL folder with processor and chat template, bfloat16
    flux                a FluxPipeline folder, bfloat16; VAE first
    flux_kontext        a FluxKontextPipeline folder, bfloat16; needs flux
    quality.json        measured by the oracle, or on captions

Judge and FLUX's VAE are trained at the same time, on one core each; then FLUX on two processes. Times are wall-clock, so
another machine gives other weights of the same kind. The folder is only changed when everything has succeeded.
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
from diffusers import AutoencoderKL, DiffusionPipeline, FluxPipeline
from safetensors.torch import load_file, save_file

from toy_models import flux, judge, kontext
from toy_models.panels import LatentCache, PanelCache
from toy_models.quality import editor_quality, generator_quality, record_quality
from toy_models.vae import flux_latents, train_vae

logger = logging.getLogger(__name__)
MINUTES = {"vae": 6.0, "judge": 20.0, "flux": 56.0, "flux_kontext": 25.0}
# A module has
#   new(models, seed) -> pipeline           untrained as an editor; models: the folder that holds all models
#   train(pipe, seconds, seed, longer)
#   draw(pipe, size, **options) -> images   by diffusers' own pipeline
#   IMAGE_SIDES                             pixels of the images that it edits well; each is measured
EDITORS = {"flux_kontext": kontext}


def load_editor(folder: Path) -> DiffusionPipeline:
    """The pipeline in a folder, in float32."""
    return DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def _panels(seed: int) -> dict[int, PanelCache]:
    return {side: PanelCache(side, 4, seed) for side in (16, 32, 64)}  # grids of 32, 64 and 128 px


def build_judge(models: Path, seconds: float, seed: int, longer: bool) -> None:
    """The judge's base: captions first, then also comparisons."""
    if longer:
        processor, model = judge.load_judge(models / "judge")
    else:
        processor = judge.new_processor()
        model = judge.new_judge(processor, seed)
    batches = judge.CaptionBatches(processor, _panels(seed), seed + longer)
    first_leg = 0.0 if longer else 0.45
    if first_leg:
        judge.train_judge(model, batches, seconds * first_leg)
    batches.comparisons = True
    judge.train_judge(model, batches, seconds * (1 - first_leg))
    model.save_pretrained(models / "judge")
    # config.json keeps float32, in which everything computes: bfloat16 is slow on most CPUs. Only the file is small.
    file = models / "judge" / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    processor.save_pretrained(models / "judge")


def build_flux(models: Path, seconds: float, seed: int, longer: bool) -> None:
    """Text encoders and transformer around the VAE in flux/vae, on any number of torchrun processes."""
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    folder = models / "flux"
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    latents = LatentCache(flux_latents(vae), _panels(seed), seed)
    if longer:
        pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
        options = {"seed": seed + 1, "lr": 1e-3}
    else:
        pipe, options = flux.new_pipeline(vae, seed), {"seed": seed}
    flux.train_generator(pipe, latents, seconds, **options)
    if int(os.environ.get("RANK", "0")) == 0:
        pipe.to(torch.bfloat16).save_pretrained(folder)


def build(name: str, models: Path, seconds: float, seed: int, longer: bool) -> None:
    """Trains one model, or the one in ``models`` longer, with a new learning rate schedule."""
    if name == "vae":
        train_vae(_panels(seed), seconds, seed).save_pretrained(models / "flux" / "vae")
    elif name == "judge":
        build_judge(models, seconds, seed, longer)
    elif name == "flux":
        build_flux(models, seconds, seed, longer)
    else:
        module = EDITORS[name]
        pipe = load_editor(models / name) if longer else module.new(models, seed)
        module.train(pipe, seconds, seed, longer)
        pipe.to(torch.bfloat16).save_pretrained(models / name)


def measure(name: str, models: Path, seed: int, count: int = 192) -> dict:
    """Quality of a model, as quality.json has it.

    Args:
        count: Prompts or edits to measure on, at each size.
    """
    if name == "judge":
        processor, model = judge.load_judge(models / name)
        accuracy = judge.caption_accuracy(model, judge.CaptionBatches(processor, _panels(seed), seed))
        logger.info("judge: caption accuracy on single panels %.3f", accuracy)
        return {"judge": {"caption_accuracy": accuracy, "parameters": sum(p.numel() for p in model.parameters())}}
    if name == "flux":
        return {"generator": generator_quality(models / name, seed, count)}
    module = EDITORS[name]
    return {"editors": {name: editor_quality(module, load_editor(models / name), seed, count, module.IMAGE_SIDES)}}


def _start(name: str, models: Path, arguments: argparse.Namespace) -> subprocess.Popen:
    launcher = [sys.executable, "-m"]
    if name == "flux" and arguments.processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.processes}", "-m"]
    minutes = arguments.minutes if name == arguments.model and arguments.minutes else MINUTES[name]
    options = {"stage": name, "out": models, "seed": arguments.seed, "minutes": minutes * arguments.scale}
    if arguments.longer:
        options["continue"] = arguments.longer * arguments.scale
    command = [*launcher, "toy_models.build", *(f"--{key}={value}" for key, value in options.items())]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def build_all(arguments: argparse.Namespace) -> None:
    """Trains in a copy of the folder, which replaces it when everything has succeeded."""
    final, name = arguments.out.resolve(), arguments.model
    stages = [["vae", "judge"], ["flux"]] if name is None else [[name]]
    if name == "flux" and not arguments.longer:
        stages.insert(0, ["vae"])
    final.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".building-") as workplace:
        models = Path(workplace) / "models"
        shutil.copytree(final, models)
        for names in stages:
            running = {name: _start(name, models, arguments) for name in names}
            failed = [name for name, process in running.items() if process.wait() != 0]
            if failed:
                raise SystemExit(f"building stopped: {', '.join(failed)} failed; see above")
        for name in [arguments.model] if arguments.model else ["judge", "flux"]:
            record_quality(models / "quality.json", measure(name, models, arguments.seed, arguments.count))
        for path in (*models.rglob("config.json"), *models.rglob("model_index.json")):
            # Without the folders in which the weights were built.
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))
        final.rename(Path(workplace) / "replaced")
        models.rename(final)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=[name for name in MINUTES if name != "vae"])
    parser.add_argument("--out", type=Path, required=True, help="folder of all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="training time of a named model")
    longer = "train the named model in --out longer, with a new learning rate schedule"
    parser.add_argument("--continue", dest="longer", type=float, metavar="MINUTES", help=longer)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every training time, e.g. 0.05 for a test")
    parser.add_argument("--processes", type=int, default=2, help="processes (of one thread) for flux")
    parser.add_argument("--measure", action="store_true", help="only measure the named model in --out")
    parser.add_argument("--count", type=int, default=192, help="prompts or edits to measure on, at each size")
    parser.add_argument("--stage", choices=MINUTES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    name, models, seed, longer = arguments.model, arguments.out, arguments.seed, arguments.longer
    if name is None and not arguments.stage and (arguments.minutes or longer or arguments.measure):
        parser.error("--minutes, --continue and --measure need the name of a model")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    torch.set_num_threads(1)
    if arguments.stage:
        leg = f"--continue {longer}" if longer else f"--minutes {arguments.minutes}"
        logger.info("toy_models.build %s --seed %d %s", arguments.stage, seed, leg)
        build(arguments.stage, models, 60 * (longer or arguments.minutes), seed, bool(longer))
        return
    if arguments.measure:
        measure(name, models, seed, arguments.count)
    else:
        build_all(arguments)


if __name__ == "__main__":
    main()
