"""What ``--scorer`` puts in the judge's place.

Image similarities in [0, 1], which need no judge and ignore the question (``eval.py``), and
EditScore (Edit-Bench's ``evaluation.py``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from paco_eval.judges import ScorePairs
from paco_judge.encoders import dreamsim_encoder, open_clip_encoder
from paco_judge.errors import UserError
from paco_judge.questions import Pair
from paco_judge.verdict import Verdict

BASELINES = {  # --scorer -> its exact name, for the rows of a results file
    "clip_i": "clip_i ViT-H-14 laion2b_s32b_b79k",
    "dreamsim": "dreamsim ensemble",
    "histogram": "histogram",
}
# The package of a baseline, and what loads it.
ENCODERS = {
    "clip_i": ("open_clip_torch", open_clip_encoder),
    "dreamsim": ("dreamsim", dreamsim_encoder),
}


def make_baseline(name: str, batch_size: int = 8) -> ScorePairs:
    """One of ``BASELINES`` as an engine that encodes ``batch_size`` images at once.

    Raises UserError: Its package is missing, or its weights.
    """
    if name == "histogram":
        return partial(_similarities, histograms, _overlap)
    package, load = ENCODERS[name]
    try:
        import torch

        encoder = load("cuda" if torch.cuda.is_available() else "cpu")
    except ImportError as error:
        raise UserError(
            f"--scorer {name} needs the package {package} ({error}); pip install {package}"
        ) from error

    def features(images: Sequence[Image.Image]) -> np.ndarray:
        return encoder.unit_features(images, batch_size).double().cpu().numpy()

    return partial(_similarities, features, _cosine_to_one)


@dataclass(frozen=True)
class GradedEdit(Pair):
    """An image before and after an edit, whose instruction is ``question``."""

    dimension: str = "overall"  # one of EDIT_DIMENSIONS


class EditScoreService:
    """EditScore's grades by the reward service ``edit_score`` of PaCo-GRPO, an engine.

    Raises UserError: PaCo-GRPO is not installed, or no such service answers.
    """

    def __init__(self, server: str) -> None:
        try:
            from paco_grpo.item import Item
            from paco_grpo.rewards.remote.client import RemoteReward
        except ImportError as error:
            raise UserError(
                f"--scorer edit_score needs PaCo-GRPO ({error}); use the environment of setup.sh"
            ) from error
        self._item = Item
        self._reward = RemoteReward("edit_score", server)
        self.identity = self._reward.identity()

    def __call__(self, pairs: Sequence[GradedEdit]) -> list[Verdict]:
        items = []
        for number, pair in enumerate(pairs):
            row = {"edit_score_dimension": pair.dimension}
            item = self._item(number, pair.question, metadata=row, references=(pair.image_a,))
            items.append(item)
        scores = self._reward([pair.images[1] for pair in pairs], items)
        verdicts = []
        for score in scores.tolist():
            missing = math.isnan(score)
            verdicts.append(Verdict(None, "EditScore gave no score") if missing else Verdict(score))
        return verdicts


def _similarities(
    describe: Callable[[Sequence[Image.Image]], np.ndarray],
    compare: Callable[[np.ndarray, np.ndarray], np.ndarray],
    pairs: Sequence[Pair],
) -> list[Verdict]:
    """How similar the two images of each pair are. Every image is described once."""
    images = {}
    for pair in pairs:
        for image in pair.images:
            images[id(image)] = image
    descriptions = dict(zip(images, describe(list(images.values())), strict=True))
    firsts = np.stack([descriptions[id(pair.image_a)] for pair in pairs])
    seconds = np.stack([descriptions[id(pair.image_b)] for pair in pairs])
    values = compare(firsts, seconds).clip(0.0, 1.0)
    return list(map(Verdict, values.tolist()))


def _overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.minimum(first, second).sum(1)


def _cosine_to_one(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(1 + cosine) / 2 of unit vectors."""
    return (1.0 + (first * second).sum(1)) / 2


def histograms(images: Sequence[Image.Image]) -> np.ndarray:
    """Share of pixels in each of 8 x 8 x 8 RGB cells, (n, 512); rows sum to 1."""
    rows = []
    for image in images:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
        counts, _ = np.histogramdd(pixels, 8, [(0, 256)] * 3)
        rows.append(counts.ravel() / len(pixels))
    return np.stack(rows)
