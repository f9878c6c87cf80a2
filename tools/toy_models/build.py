"""Builds one toy model from a seed into the folder of all models: `python -m toy_models.build MODEL --out FOLDER`.

    vae             FLUX's VAE, in flux/vae
    flux            a FluxPipeline folder, bfloat16; needs vae
    flux_kontext    a FluxKontextPipeline folder, bfloat16; needs flux
    judge           a Qwen2.5-VL folder with processor and chat template, bfloat16

Training stops after a wall-clock time, so another machine gives other weights of the same kind.
"""

import argparse
import logging
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from toy_models import flux, judge, kontext

MINUTES = {"vae": 6.0, "judge": 20.0, "flux": 110.0, "flux_kontext": 25.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MINUTES)
    parser.add_argument("--out", type=Path, required=True, help="folder of all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help=f"training time; default {MINUTES}")
    arguments = parser.parse_args()
    name, models = arguments.model, arguments.out
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    folder, seconds, seed = models / name, 60 * (arguments.minutes or MINUTES[name]), arguments.seed
    if name == "vae":
        flux.new_vae(seconds, seed).save_pretrained(models / "flux" / "vae")
    elif name == "judge":
        processor = judge.world_processor()
        model = judge.new_judge(processor, seed)
        judge.train(model, processor, seconds, seed)
        model.save_pretrained(folder)
        # config.json keeps float32, in which everything computes: bfloat16 is slow on most CPUs. Only the file is small.
        file = folder / "model.safetensors"
        save_file(
            {name: weight.bfloat16() for name, weight in load_file(file).items()},
            file,
            metadata={"format": "pt"},
        )
        processor.save_pretrained(folder)
    else:
        if name == "flux":
            pipe = flux.new_pipeline(
                AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32), seed
            )
            flux.train(pipe, seconds, seed)
        else:
            pipe = kontext.new(models, seed)
            kontext.train(pipe, seconds, seed)
        pipe.to(torch.bfloat16).save_pretrained(folder)
    for path in (*folder.rglob("config.json"), *folder.glob("model_index.json")):
        # without the folders in which the weights were built
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))


if __name__ == "__main__":
    main()
