"""Trains the weights of a toy model again: ``python quickstart/models/build.py MODEL --out FOLDER``.

    vae      FLUX's VAE, in FOLDER/flux
    flux     a FluxPipeline, bfloat16, in FOLDER/flux; its VAE is trained before
    judge    a Qwen2.5-VL, bfloat16, in FOLDER/judge

Sizes, tokenizers and schedulers are those of the folders beside this file. Training stops after a
wall-clock time, so another machine gives other weights of the same kind. The recipe of flux_kontext
is tools/toy_models/kontext.py at commit e793f4b1.
"""

import argparse
import logging
import shutil
from pathlib import Path

import flux
import judge
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5EncoderModel,
)

HERE = Path(__file__).parent
MINUTES = {"vae": 6.0, "judge": 20.0, "flux": 110.0}


def build_vae(models: Path, seconds: float, seed: int) -> None:
    """``models``/flux with a new VAE; the rest is a copy."""
    folder = models / "flux"
    shutil.copytree(HERE / "flux", folder, dirs_exist_ok=True)
    torch.manual_seed(seed)
    vae = AutoencoderKL.from_config(AutoencoderKL.load_config(folder / "vae"))
    flux.train_vae(vae, seconds, seed)
    vae.save_pretrained(folder / "vae")


def build_flux(models: Path, seconds: float, seed: int) -> None:
    """``models``/flux with a new transformer and new text encoders around the VAE that is there."""
    folder = models / "flux"
    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    torch.manual_seed(seed)
    pipe.text_encoder = CLIPTextModel(pipe.text_encoder.config)
    pipe.text_encoder_2 = T5EncoderModel(pipe.text_encoder_2.config)
    pipe.transformer = FluxTransformer2DModel.from_config(pipe.transformer.config)
    flux.pretrain_text(pipe.tokenizer_2, pipe.text_encoder, pipe.text_encoder_2, seed)
    flux.train(pipe, seconds, seed)
    pipe.to(torch.bfloat16).save_pretrained(folder)
    _remove_build_paths(folder)


def build_judge(models: Path, seconds: float, seed: int) -> None:
    """``models``/judge."""
    folder = models / "judge"
    processor = AutoProcessor.from_pretrained(HERE / "judge")
    torch.manual_seed(seed)
    # With Qwen's initializer_range of 0.02 it would not start to learn; its configuration has 0.06.
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(HERE / "judge"))
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


BUILDERS = {"vae": build_vae, "flux": build_flux, "judge": build_judge}


def main() -> None:
    """Trains the model that the command line names."""
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
