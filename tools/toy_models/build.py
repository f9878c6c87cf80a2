"""Builds one toy model from a seed into the folder of all models: `python -m toy_models.build MODEL --out FOLDER`.

    vae             FLUX's VAE, in flux/vae
    flux            a FluxPipeline folder, bfloat16; needs vae; on any number of torchrun processes
    flux_kontext    a FluxKontextPipeline folder, bfloat16; needs flux
    judge           a Qwen2.5-VL folder with processor and chat template, bfloat16

Then it measures the model, by the oracle or on captions, and records that in quality.json. Training stops after a wall-clock
time, so another machine gives other weights of the same kind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from safetensors.torch import load_file, save_file

from toy_models import flux, judge, kontext
from toy_models.panels import LatentCache, PanelCache
from toy_models.quality import editor_quality, generator_quality
from toy_models.vae import flux_latents, train_vae

MINUTES = {"vae": 6.0, "judge": 20.0, "flux": 56.0, "flux_kontext": 25.0}


def build_judge(folder: Path, panels: dict[int, PanelCache], seconds: float, seed: int) -> None:
    """The judge's base: captions first, then also comparisons."""
    processor = judge.new_processor()
    model = judge.new_judge(processor, seed)
    batches = judge.CaptionBatches(processor, panels, seed)
    judge.train_judge(model, batches, seconds * 0.45)
    batches.comparisons = True
    judge.train_judge(model, batches, seconds * 0.55)
    model.save_pretrained(folder)
    # config.json keeps float32, in which everything computes: bfloat16 is slow on most CPUs. Only the file is small.
    file = folder / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    processor.save_pretrained(folder)


def build(name: str, models: Path, seconds: float, seed: int) -> None:
    """Trains one model."""
    panels = {side: PanelCache(side, 4, seed) for side in (16, 32, 64)}  # grids of 32, 64 and 128 px
    if name == "vae":
        train_vae(panels, seconds, seed).save_pretrained(models / "flux" / "vae")
    elif name == "judge":
        build_judge(models / name, panels, seconds, seed)
    elif name == "flux":
        vae = AutoencoderKL.from_pretrained(models / name / "vae", torch_dtype=torch.float32)
        pipe = flux.new_pipeline(vae, seed)
        flux.train_generator(pipe, LatentCache(flux_latents(vae), panels, seed), seconds, seed)
        if int(os.environ.get("RANK", "0")) == 0:
            pipe.to(torch.bfloat16).save_pretrained(models / name)
    else:
        pipe = kontext.new(models, seed)
        kontext.train(pipe, seconds, seed)
        pipe.to(torch.bfloat16).save_pretrained(models / name)


def measure(name: str, models: Path, seed: int, count: int) -> dict:
    """Quality of a model on ``count`` prompts or edits at each size, as quality.json has it."""
    if name == "judge":
        processor, model = judge.load_judge(models / name)
        batches = judge.CaptionBatches(processor, {side: PanelCache(side, 4, seed) for side in (16, 32, 64)}, seed)
        accuracy = judge.caption_accuracy(model, batches)
        return {"judge": {"caption_accuracy": accuracy, "parameters": sum(p.numel() for p in model.parameters())}}
    if name == "flux":
        return {"generator": generator_quality(models / name, seed, count)}
    pipe = FluxKontextPipeline.from_pretrained(models / name, torch_dtype=torch.float32)
    return {"editors": {name: editor_quality(pipe, seed, count)}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MINUTES)
    parser.add_argument("--out", type=Path, required=True, help="folder of all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help=f"training time; default {MINUTES}")
    parser.add_argument("--count", type=int, default=192, help="prompts or edits to measure on, at each size")
    arguments = parser.parse_args()
    name, models, seed = arguments.model, arguments.out, arguments.seed
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    build(name, models, 60 * (arguments.minutes or MINUTES[name]), seed)
    if name == "vae" or int(os.environ.get("RANK", "0")):
        return
    for path in (*(models / name).rglob("config.json"), models / name / "model_index.json"):
        if path.is_file():  # without the folders in which the weights were built
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))
    file = models / "quality.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | measure(name, models, seed, arguments.count), indent=2) + "\n")


if __name__ == "__main__":
    main()
