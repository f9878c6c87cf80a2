"""Builds one toy model from a seed into the folder of all models: `python -m toy_models.build MODEL --out FOLDER`.

    vae             FLUX's VAE, in flux/vae
    flux            a FluxPipeline folder, bfloat16; needs vae
    flux_kontext    a FluxKontextPipeline folder, bfloat16; needs flux
    judge           a Qwen2.5-VL folder with processor and chat template, bfloat16

Then it measures the model, by the oracle or on captions, and records that in quality.json. Training stops after a wall-clock
time, so another machine gives other weights of the same kind.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline
from safetensors.torch import load_file, save_file

from toy_models import flux, judge, kontext
from toy_models.quality import editor_quality, generator_quality

MINUTES = {"vae": 6.0, "judge": 20.0, "flux": 110.0, "flux_kontext": 25.0}


def build(name: str, models: Path, seconds: float, seed: int, count: int) -> dict:
    """Trains and saves one model; returns its part of quality.json, measured on ``count`` prompts or edits at each size."""
    folder = models / name
    if name == "vae":
        flux.new_vae(seconds, seed).save_pretrained(models / "flux" / "vae")
        return {}
    if name == "judge":
        processor = judge.world_processor()
        model, batches = judge.new_judge(processor, seed), judge.CaptionBatches(processor, seed)
        judge.train(model, batches, seconds)
        model.save_pretrained(folder)
        # config.json keeps float32, in which everything computes: bfloat16 is slow on most CPUs. Only the file is small.
        file = folder / "model.safetensors"
        save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
        processor.save_pretrained(folder)
        model = type(model).from_pretrained(folder, dtype=torch.float32)
        parameters = sum(p.numel() for p in model.parameters())
        return {"judge": {"caption_accuracy": judge.caption_accuracy(model, batches), "parameters": parameters}}
    if name == "flux":
        vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
        pipe, train = flux.new_pipeline(vae, seed), flux.train
    else:
        pipe, train = kontext.new(models, seed), kontext.train
    train(pipe, seconds, seed)
    pipe.to(torch.bfloat16).save_pretrained(folder)
    pipe = type(pipe).from_pretrained(folder, torch_dtype=torch.float32)
    if isinstance(pipe, FluxKontextPipeline):
        return {"editors": {name: editor_quality(pipe, seed, count)}}
    return {"generator": generator_quality(pipe, seed, count)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MINUTES)
    parser.add_argument("--out", type=Path, required=True, help="folder of all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help=f"training time; default {MINUTES}")
    parser.add_argument("--count", type=int, default=192, help="prompts or edits to measure on, at each size")
    arguments = parser.parse_args()
    name, models = arguments.model, arguments.out
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    measured = build(name, models, 60 * (arguments.minutes or MINUTES[name]), arguments.seed, arguments.count)
    for path in (*(models / name).rglob("config.json"), *(models / name).glob("model_index.json")):
        # without the folders in which the weights were built
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))
    file = models / "quality.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
