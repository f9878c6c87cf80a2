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
import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from training import Losses, draw, fit, for_seconds
from transformers import (
    AutoProcessor,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    T5EncoderModel,
)

from paco_toy import world

# The toy judge's base is a small Qwen2.5-VL that has never seen the judge's question. It learns
# captions and yes/no questions about single panels, then to name what two panels have in common. On
# the judge's question it is at chance: that is left to PaCo-Reward. (A base that knew captions only
# was still at chance after 800 steps of LoRA.)
CAPTION_ONE = "What does the image show?"
CAPTION_TWO = "What do the two images show?"
COMPARISON = "What do the two images have in common?"
PRESENCE = "Does the image show something {}? Answer Yes or No."


def _caption_two(first: world.Character, second: world.Character) -> str:
    return f"First {world.with_article(first)}, second {world.with_article(second)}."


def _in_common(first: world.Character, second: world.Character) -> str:
    shared = [name for name in world.ATTRIBUTES if getattr(first, name) == getattr(second, name)]
    if len(shared) == len(world.ATTRIBUTES):
        return "Everything."
    if not shared:
        return "Nothing."
    return f"Only {' and '.join(shared)}."


def _question(rng: np.random.Generator, comparisons: bool) -> tuple[list[int], str, str]:
    """Characters, question, answer."""
    first, second = rng.integers(len(world.CHARACTERS), size=2).tolist()
    kind = rng.random()
    character = world.CHARACTERS[first]
    if comparisons and rng.random() < 0.5:
        # The same character, a similar one, or any.
        second = (first, world.departed(first, rng), second)[rng.integers(3)]
        return [first, second], COMPARISON, _in_common(character, world.CHARACTERS[second])
    if kind < 0.3:
        return [first], CAPTION_ONE, f"A {character}."
    if kind < 0.8:
        if rng.random() < 0.25:
            second = first
        return [first, second], CAPTION_TWO, _caption_two(character, world.CHARACTERS[second])
    attribute = list(world.ATTRIBUTES)[rng.integers(len(world.ATTRIBUTES))]
    is_shown = rng.random() < 0.5
    other = character if is_shown else world.changed(character, attribute, rng)
    question = PRESENCE.format(getattr(other, attribute))
    return [first], question, "Yes." if is_shown else "No."


def _panel(character: int, rng: np.random.Generator) -> torch.Tensor:
    """In any view and size, with noise of up to 0.08: uint8 (3, S, S)."""
    side = int(rng.choice([16, 32, 64]))  # of grids of 32, 64 and 128 px
    view = rng.integers(len(world.VIEWS))
    pixels = draw(side, np.array(character), view, rng)
    scale = rng.uniform(0, world.MAX_NOISE)
    noise = rng.normal(scale=255 * scale, size=pixels.shape)
    return torch.from_numpy(np.clip(pixels + noise, 0, 255)).permute(2, 0, 1).to(torch.uint8)


def _batch(
    processor: Qwen2_5_VLProcessor, rng: np.random.Generator, comparisons: bool
) -> dict[str, torch.Tensor]:
    """Right-padded inputs; labels are -100 except on the answers and their ends."""
    examples = [_question(rng, comparisons) for _ in range(32)]
    images = []
    texts = []
    answers = []
    for characters, question, answer in examples:
        images += [_panel(character, rng) for character in characters]
        content = [{"type": "image"}] * len(characters) + [{"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
        texts.append(text.removesuffix("\n"))
        answers.append(answer)
    inputs = processor(
        text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"
    )
    answer_ids = processor.tokenizer(answers).input_ids
    lengths = torch.tensor([len(ids) + 1 for ids in answer_ids])  # with <|im_end|>
    ends = inputs["attention_mask"].sum(dim=1)
    place = torch.arange(inputs["input_ids"].shape[1])
    is_answer = (place < ends[:, None]) & (place >= (ends - lengths)[:, None])
    return {**inputs, "labels": inputs["input_ids"].masked_fill(~is_answer, -100)}


def train_judge(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    seconds: float,
    seed: int,
) -> None:
    """Captions and questions first, then also comparisons."""
    rng = np.random.default_rng([seed, 3])
    for comparisons, share in ((False, 0.45), (True, 0.55)):

        def next_losses(step: int, progress: float, comparisons: bool = comparisons) -> Losses:
            return {"loss": model(**_batch(processor, rng, comparisons)).loss}

        fit([(model, 1.5e-3)], next_losses, "judge", for_seconds(share * seconds), decay=0.6)


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
    steps = max(1, round(seconds / 11))  # 600 in the default time
    flux.pretrain_text(pipe.tokenizer_2, pipe.text_encoder, pipe.text_encoder_2, steps, seed)
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
    train_judge(model, processor, seconds, seed)
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
