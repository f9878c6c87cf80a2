"""The oracle: reads from pixel statistics alone which character and view each panel of a grid shows. Nothing trains on it.

Each panel is compared with the rendering of every character in every view, and with an empty panel. A panel that is
nearest to empty, or further than ``INVALID_RMS`` from everything, is invalid. The factories at the end are rewards for
PaCo-GRPO, given by import path (`paco_toy.oracle:oracle_consistency`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from paco_grpo.rewards.judge import BetweenImages, ConsistencyScore
from paco_toy import world

INVALID_RMS = 0.12  # root mean square pixel distance, pixels in [0, 1]
_FIRST, _SECOND = np.triu_indices(4, k=1)  # the six pairs of panels


@dataclass(frozen=True)
class Reading:
    """What B grids of four panels show. Arrays (B, 4), panels row-major; results (B,) float64."""

    character: np.ndarray  # int, index into CHARACTERS; meaningless where invalid
    view: np.ndarray  # int, index into VIEWS; meaningless where invalid
    valid: np.ndarray  # bool

    def _pairs(
        self, agree: Callable[[np.ndarray, np.ndarray], np.ndarray], values: np.ndarray
    ) -> np.ndarray:
        valid = self.valid[:, _FIRST] & self.valid[:, _SECOND]
        return np.mean(valid & agree(values[:, _FIRST], values[:, _SECOND]), axis=1)

    def consistency(self) -> np.ndarray:
        """Share of panel pairs with the same character, both valid."""
        return self._pairs(np.equal, self.character)

    def distinctness(self) -> np.ndarray:
        """Share of panel pairs in different views, both valid."""
        return self._pairs(np.not_equal, self.view)

    def shows(self, named: Sequence[world.Character]) -> np.ndarray:
        """Which panels have every attribute that their prompt names: bool (B, 4)."""
        right = self.valid.copy()
        for name, values in world.ATTRIBUTES.items():
            wanted = np.array(
                [[values.index(v) if (v := getattr(c, name)) != world.OPEN else -1] for c in named]
            )
            right &= (wanted < 0) | (world.ATTRIBUTE_VALUES[name][self.character] == wanted)
        return right

    def alignment(self, named: Sequence[world.Character]) -> np.ndarray:
        """Share of panels that show what their prompt names."""
        return np.mean(self.shows(named), axis=1)

    def agreement(self, named: Sequence[world.Character]) -> np.ndarray:
        """Of pairs of panels that show what is named, the share that agrees on the rest; 0 if none, NaN for full prompts."""
        right, shown = self.shows(named), self.character
        pairs = right[:, _FIRST] & right[:, _SECOND]
        agree = pairs & (shown[:, _FIRST] == shown[:, _SECOND])
        share = agree.sum(axis=1) / np.maximum(pairs.sum(axis=1), 1)
        return np.where([bool(c.left_open) for c in named], share, np.nan)

    def choices(self, named: Sequence[world.Character], attribute: str) -> np.ndarray:
        """The value of an open attribute that most panels of an image have: float (B, V), one-hot, a tie in parts.

        Only panels that show what is named count. Zeros without such a panel, or where the attribute is not open.
        """
        right = self.shows(named) & np.array([[attribute in c.left_open] for c in named])
        values = np.arange(len(world.ATTRIBUTES[attribute]))
        votes = (
            (world.ATTRIBUTE_VALUES[attribute][self.character][..., None] == values)
            & right[..., None]
        ).sum(axis=1)
        most = (votes == votes.max(axis=1, keepdims=True)) & votes.any(axis=1, keepdims=True)
        return most / np.maximum(most.sum(axis=1, keepdims=True), 1)


def evenness(choices: np.ndarray) -> float:
    """Entropy of choices (B, V) over images, divided by the largest possible one; NaN if all are zero."""
    chosen = choices.sum(axis=0)
    if not chosen.any():
        return float("nan")
    shares = chosen[chosen > 0] / chosen.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(len(chosen)))


@lru_cache(maxsize=4)
def _templates(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Renderings (K, 3·side²) of all characters and views, an empty panel last, and their squared norms (K,)."""
    panels = [world.render_panel(c, v, side) for c in world.CHARACTERS for v in world.VIEWS]
    panels.append(np.ones((side, side, 3), dtype=np.float32))
    flat = np.stack(panels).reshape(len(panels), -1).astype(np.float32)
    return flat, np.einsum("kd,kd->k", flat, flat)


def read_grids(images: Sequence[Image.Image]) -> Reading:
    """Reads 2x2 grids of any square size from 32 px on; panels are averaged down to 32 px."""
    found = []
    for image in images:
        side = min(image.width // 2, 32)
        templates, norms = _templates(side)
        if image.size != (2 * side, 2 * side):
            image = image.resize((2 * side, 2 * side), Image.Resampling.BOX)
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
        panels = pixels.reshape(2, side, 2, side, 3).transpose(0, 2, 1, 3, 4).reshape(4, -1)
        squared = np.einsum("pd,pd->p", panels, panels)[:, None] - 2 * panels @ templates.T + norms
        nearest = squared.argmin(axis=1)
        rms = np.sqrt(np.maximum(squared[np.arange(4), nearest], 0) / panels.shape[1])
        empty = nearest == len(norms) - 1
        shown = [np.where(empty, -1, number) for number in np.divmod(nearest, len(world.VIEWS))]
        found.append((*shown, ~empty & (rms <= INVALID_RMS)))
    return Reading(*map(np.array, zip(*found)))


def read_prompt(prompt: str) -> world.Character:
    """The character that a prompt or theme of the shapes world names; raises ValueError for others."""
    found = re.search(r" depicting an? ([^.]*)\.", prompt)
    words = found[1] if found else ""
    named = {
        name: word
        for word in words.split()
        for name, values in world.ATTRIBUTES.items()
        if word in values
    }
    character = world.Character(**dict.fromkeys(world.ATTRIBUTES, world.OPEN) | named)
    if not named or str(character) != words:
        raise ValueError(f"not a prompt of the shapes world: {prompt!r}")
    return character


Scorer = Callable[[Sequence[Image.Image], Sequence], np.ndarray]
# The rewards of a second judge: names of their own, so that an evaluation can ask both judges.
other_consistency, other_between_images = ConsistencyScore, BetweenImages


def _reward(measure: Callable[[Reading, Sequence], np.ndarray]) -> Callable[[], Scorer]:
    return lambda: lambda images, items: measure(read_grids(images), items)


oracle_consistency = _reward(lambda reading, items: reading.consistency())
oracle_alignment = _reward(
    lambda reading, items: reading.alignment([read_prompt(item.prompt) for item in items])
)
oracle_distinct = _reward(lambda reading, items: reading.distinctness())


def oracle_between_images() -> Scorer:
    """Reward factory: 1 − the share of pairs of valid panels of two images of a group that show the same character.

    Float64 (B,), the mean over the other images of the group; 1 for full prompts, as ``between_images``.
    """

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        reading, scores = read_grids(images), np.ones(len(images))
        shown = np.where(reading.valid, reading.character, -1)
        for item_id in {item.item_id for item in items if read_prompt(item.prompt).left_open}:
            members = np.flatnonzero([item.item_id == item_id for item in items])
            counts = (shown[members, :, None] == np.arange(len(world.CHARACTERS))).sum(axis=1)
            equal = counts @ counts.T / 16  # (n, n)
            if len(members) > 1:
                scores[members] = 1 - (equal.sum(axis=1) - equal.diagonal()) / (len(members) - 1)
        return scores

    score.compares_images = True
    return score
