"""Trains the weights of the toy models again: ``python quickstart/models/build.py --out FOLDER``.

FOLDER/flux is a FluxPipeline and FOLDER/judge a Qwen2.5-VL, both in bfloat16. Sizes, tokenizers and
schedulers are those of the folders beside this file. The recipe of flux_kontext is
tools/toy_models/kontext.py at commit e793f4b1.
"""

import argparse
import math
import shutil
from pathlib import Path

import flux
import judge
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from transformers import (
    AutoProcessor,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5EncoderModel,
)

HERE = Path(__file__).parent


def build_flux(folder: Path, share: float) -> None:
    """A new VAE, then new text encoders and a new transformer."""
    pipe = FluxPipeline.from_pretrained(HERE / "flux", torch_dtype=torch.float32)
    torch.manual_seed(0)
    pipe.vae = AutoencoderKL.from_config(AutoencoderKL.load_config(HERE / "flux" / "vae"))
    flux.train_vae(pipe.vae, math.ceil(share * flux.VAE_STEPS))
    torch.manual_seed(0)
    pipe.text_encoder = CLIPTextModel(pipe.text_encoder.config)
    pipe.text_encoder_2 = T5EncoderModel(pipe.text_encoder_2.config)
    pipe.transformer = FluxTransformer2DModel.from_config(pipe.transformer.config)
    flux.pretrain_text(pipe, math.ceil(share * flux.TEXT_STEPS))
    flux.train(pipe, math.ceil(share * flux.STEPS))
    pipe.to(torch.bfloat16).save_pretrained(folder)


def build_judge(folder: Path, share: float) -> None:
    """New weights; the rest is a copy."""
    processor = AutoProcessor.from_pretrained(HERE / "judge")
    torch.manual_seed(0)
    # With Qwen's initializer_range of 0.02 it would not start to learn; its configuration has 0.06.
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(HERE / "judge"))
    judge.train(model, processor, share)
    model.bfloat16().save_pretrained(folder)
    # Only the file is small: config.json has float32, in which everything computes, because
    # bfloat16 is slow on most CPUs.
    weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(HERE / "judge", folder, ignore=weights, dirs_exist_ok=True)


def main() -> None:
    """Trains both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the models")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a try")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    build_judge(arguments.out / "judge", arguments.share)
    build_flux(arguments.out / "flux", arguments.share)


if __name__ == "__main__":
    main()
