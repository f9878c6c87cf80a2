"""Builds one toy model from a seed into the folder of all models.

    python -m toy_models.build MODEL --out FOLDER

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


def build_vae(models: Path, seconds: float, seed: int) -> None:
    """The VAE's folder in ``models``/flux."""
    flux.new_vae(seconds, seed).save_pretrained(models / "flux" / "vae")


def build_flux(models: Path, seconds: float, seed: int) -> None:
    """``models``/flux, around the VAE that is there."""
    folder = models / "flux"
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    pipe = flux.new_pipeline(vae, seed)
    flux.train(pipe, seconds, seed)
    pipe.to(torch.bfloat16).save_pretrained(folder)
    _remove_build_paths(folder)


def build_flux_kontext(models: Path, seconds: float, seed: int) -> None:
    """``models``/flux_kontext, from the base in ``models``/flux."""
    folder = models / "flux_kontext"
    pipe = kontext.new(models, seed)
    kontext.train(pipe, seconds, seed)
    pipe.to(torch.bfloat16).save_pretrained(folder)
    _remove_build_paths(folder)


def build_judge(models: Path, seconds: float, seed: int) -> None:
    """``models``/judge."""
    folder = models / "judge"
    processor = judge.world_processor()
    model = judge.new_judge(processor, seed)
    judge.train(model, processor, seconds, seed)
    model.save_pretrained(folder)
    # Only the file is small: config.json keeps float32, in which everything computes, because
    # bfloat16 is slow on most CPUs.
    file = folder / "model.safetensors"
    weights = {name: weight.bfloat16() for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    processor.save_pretrained(folder)
    _remove_build_paths(folder)


def _remove_build_paths(folder: Path) -> None:
    """Deletes the paths of this machine that the libraries write into configurations."""
    for path in (*folder.rglob("config.json"), *folder.glob("model_index.json")):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))


BUILDERS = {
    "vae": build_vae,
    "judge": build_judge,
    "flux": build_flux,
    "flux_kontext": build_flux_kontext,
}


def main() -> None:
    """Builds the model that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=BUILDERS)
    parser.add_argument("--out", type=Path, required=True, help="folder of all models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help=f"training time; default {MINUTES}")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    minutes = arguments.minutes or MINUTES[arguments.model]
    BUILDERS[arguments.model](arguments.out, 60 * minutes, arguments.seed)


if __name__ == "__main__":
    main()
