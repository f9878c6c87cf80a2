"""`paco-reward export`: merges an adapter into one model folder for transformers and vLLM."""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from paco_judge.errors import UserError
from paco_judge.questions import Pair, theme_question
from paco_judge.scorer import JudgeScorer
from paco_judge.weights import (
    from_pretrained_strict,
    image_limits,
    load_adapter,
    local_folder,
    save_model,
)
from paco_reward.families import write_limits

# The merged model writes these itself.
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors.index.json"}
PROCESSOR_SUFFIXES = (".json", ".txt", ".jinja", ".model")
LARGEST_DIFFERENCE = 0.05  # of P(Yes); saving in bfloat16 changes it by less


def export(base: str, adapter: str, output: str | Path) -> float:
    """Merge an adapter into its base and save weights, processor and chat template.

    Weights are saved as the base stores them, and the processor limits images as in the training.
    ``output`` is written only after the merged model has given the scores of base and adapter on
    ``synthetic_pairs``.

    Returns:
        The largest difference of P(Yes), in [0, 1].

    Raises:
        UserError: ``output`` has files, the adapter's values are not finite, or the merged model
            has other scores or none.
    """
    output = Path(output).resolve()
    if output.exists() and any(output.iterdir()):
        raise UserError(f"output folder {output} is not empty; name another one")
    # Renamed at the end, so that an interrupted or wrong export never looks complete.
    work = output.with_name(f".{output.name}.export")
    shutil.rmtree(work, ignore_errors=True)  # what a kill left
    try:
        save_merged(base, adapter, work)
        difference = largest_difference(base, adapter, work)
        if difference > LARGEST_DIFFERENCE:
            raise UserError(
                f"the merged model changes P(Yes) by up to {difference:.3f}; nothing is written. "
                f"Does the adapter {adapter} belong to the base {base}?"
            )
        work.rename(output)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return difference


def save_merged(base: str, adapter: str, folder: Path) -> None:
    """Write base plus adapter as a model folder."""
    from transformers import AutoModelForImageTextToText

    # As it is stored: peft adds a float32 product to a weight of any precision and rounds once.
    model = from_pretrained_strict(AutoModelForImageTextToText, base, dtype="auto")
    save_model(load_adapter(model, adapter).merge_and_unload(), folder)
    patterns = tuple(f"*{suffix}" for suffix in PROCESSOR_SUFFIXES)
    for file in local_folder(base, patterns).iterdir():
        if file.suffix in PROCESSOR_SUFFIXES and file.name not in MODEL_FILES:
            shutil.copyfile(file, folder / file.name)
    if limits := image_limits(adapter):
        write_limits(folder, limits)


def largest_difference(base: str, adapter: str, merged: Path) -> float:
    """The largest difference of P(Yes) between base with adapter and the merged model.

    Raises UserError: One of them gives a pair no score.
    """
    pairs = synthetic_pairs()
    scores = []
    for name, *judge in (("base with adapter", base, adapter), ("merged model", merged)):
        verdicts = JudgeScorer.from_pretrained(*judge).score(pairs, top=None)
        errors = [verdict.error for verdict in verdicts if not verdict.ok]
        if errors:
            raise UserError(
                f"the {name} gives {len(errors)} of {len(pairs)} test pairs no score: {errors[0]}; "
                "nothing is written"
            )
        scores.append([verdict.p_yes for verdict in verdicts])
    return float(np.abs(np.subtract(*scores)).max())


def synthetic_pairs(count: int = 100) -> list[Pair]:
    """Pairs of smooth random images, the second increasingly changed."""
    generator = np.random.default_rng(0)
    question = theme_question("a set of pictures")
    pairs = []
    for index in range(count):
        first = generator.integers(0, 256, (4, 4, 3))
        change = generator.integers(-255, 256, (4, 4, 3)) * (index / max(count - 1, 1))
        images = []
        for pixels in (first, first + change):
            image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            images.append(image.resize((112, 112), Image.Resampling.BICUBIC))
        pairs.append(Pair(images[0], images[1], question))
    return pairs
