"""`paco-reward export`: merges an adapter into one model folder for transformers and vLLM."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from paco_judge.client import Pair
from paco_judge.questions import theme_question
from paco_judge.scorer import JudgeScorer, load_adapter, local_folder, trained_limits
from paco_judge.weights import from_pretrained_strict
from paco_reward.errors import PacoRewardError
from paco_reward.families import write_limits

MODEL_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
}  # the merged model writes these
PROCESSOR_SUFFIXES = (".json", ".txt", ".jinja", ".model")
LARGEST_DIFFERENCE = 0.05  # of P(Yes); saving in bfloat16 changes it by less


def export(base: str, adapter: str, output: str | Path) -> float:
    """Merge an adapter into its base and save weights, processor and chat template.

    The merge is computed in float32 and saved as the base is stored. The processor limits images as in the training.
    ``output`` is written only after the merged model has given the scores of base and adapter on ``synthetic_pairs``.
    Returns the largest difference of P(Yes), in [0, 1]. Raises PacoRewardError.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    output = Path(output).resolve()
    if output.exists() and any(output.iterdir()):
        raise PacoRewardError(f"output folder {output} is not empty; name another one")
    saved = getattr(AutoConfig.from_pretrained(base), "dtype", None) or torch.float32
    model = from_pretrained_strict(AutoModelForImageTextToText, base, dtype=torch.float32)
    model = load_adapter(model, adapter).merge_and_unload().to(saved)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Renamed at the end: an interrupted or wrong export never looks complete.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        merged = Path(folder, "merged")
        model.save_pretrained(merged)
        for file in local_folder(
            base, tuple(f"*{suffix}" for suffix in PROCESSOR_SUFFIXES)
        ).iterdir():
            if file.suffix in PROCESSOR_SUFFIXES and file.name not in MODEL_FILES:
                shutil.copyfile(file, merged / file.name)
        if limits := trained_limits(adapter):
            write_limits(merged, limits)
        del model
        judges, pairs = ((base, adapter), (merged,)), synthetic_pairs()
        scores = [
            [verdict.p_yes for verdict in JudgeScorer.from_pretrained(*judge).score(pairs)]
            for judge in judges
        ]
        if any(None in of_one for of_one in scores):
            raise PacoRewardError(
                "a pair has no score (logits not finite); the merged model is not usable"
            )
        difference = float(np.abs(np.subtract(*scores)).max())
        if difference > LARGEST_DIFFERENCE:
            raise PacoRewardError(
                f"the merged model changes P(Yes) by up to {difference:.3f}; nothing is written. "
                f"Does the adapter {adapter} belong to the base {base}?"
            )
        merged.rename(output)
    return difference


def synthetic_pairs(count: int = 100) -> list[Pair]:
    """Pairs of smooth random images, the second increasingly changed."""
    generator = np.random.default_rng(0)
    pairs = []
    for index in range(count):
        first = generator.integers(0, 256, (4, 4, 3))
        change = generator.integers(-255, 256, (4, 4, 3)) * (index / max(count - 1, 1))
        images = [
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).resize(
                (112, 112), Image.Resampling.BICUBIC
            )
            for pixels in (first, first + change)
        ]
        pairs.append(Pair(images[0], images[1], theme_question("a set of pictures")))
    return pairs
