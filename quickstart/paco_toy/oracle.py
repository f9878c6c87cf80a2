"""The oracle: reads from pixel statistics alone which character and view each panel of a grid shows. Nothing trains on it.

Each panel is compared with the rendering of every character in every view, and with an empty panel. The nearest rendering
names the panel; a panel that is nearest to empty, or further than ``INVALID_RMS`` from everything, is invalid.

The factories at the end are rewards for PaCo-GRPO, given by import path (`paco_toy.oracle:oracle_consistency`).
"""

from __future__ import annotations

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

    def of(self, rows: np.ndarray) -> Reading:
        """The reading of some of the grids."""
        return Reading(self.character[rows], self.view[rows], self.valid[rows])

    def _pairs(self, agree: Callable[[np.ndarray, np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
        valid = self.valid[:, _FIRST] & self.valid[:, _SECOND]
        return np.mean(valid & agree(values[:, _FIRST], values[:, _SECOND]), axis=1)

    def consistency(self) -> np.ndarray:
        """Share of the six panel pairs with the same character, both valid."""
        return self._pairs(np.equal, self.character)

    def distinctness(self) -> np.ndarray:
        """Share of the six panel pairs in different views, both valid: four identical panels give 0."""
        return self._pairs(np.not_equal, self.view)

    def shows(self, named: Sequence[world.Character]) -> np.ndarray:
        """Which panels are valid and have every attribute that their prompt names: bool (B, 4)."""
        right = self.valid.copy()
        for name, values in world.ATTRIBUTES.items():
            wanted = np.array([[values.index(v) if (v := getattr(c, name)) != world.OPEN else -1] for c in named])
            right &= (wanted < 0) | (world.ATTRIBUTE_VALUES[name][self.character] == wanted)
        return right

    def alignment(self, named: Sequence[world.Character]) -> np.ndarray:
        """Share of panels that show what their prompt names."""
        return np.mean(self.shows(named), axis=1)

    def agreement(self, named: Sequence[world.Character]) -> np.ndarray:
        """Of the panels that show what is named, the share of pairs that agree on what is left open.

        NaN where the prompt is full; 0 where fewer than two panels show what is named.
        """
        right, shown = self.shows(named), self.character
        pairs = right[:, _FIRST] & right[:, _SECOND]
        agree = pairs & (shown[:, _FIRST] == shown[:, _SECOND])
        share = agree.sum(axis=1) / np.maximum(pairs.sum(axis=1), 1)
        return np.where([bool(c.left_open) for c in named], share, np.nan)

    def choice(self, named: Sequence[world.Character], attribute: str) -> float:
        """How evenly an open attribute's value is chosen over images: 1 = all values equally often, 0 = always the same.

        Each image whose prompt leaves the attribute open counts as the value that most of its panels have (a tie counts in
        parts; only panels that show what is named). The result is the entropy of these values, divided by the largest
        possible one. NaN without such an image.
        """
        right = self.shows(named) & np.array([[attribute in c.left_open] for c in named])
        values = np.arange(len(world.ATTRIBUTES[attribute]))
        votes = ((world.ATTRIBUTE_VALUES[attribute][self.character][..., None] == values) & right[..., None]).sum(axis=1)  # (B, V)
        most = (votes == votes.max(axis=1, keepdims=True)) & votes.any(axis=1, keepdims=True)
        chosen = (most / np.maximum(most.sum(axis=1, keepdims=True), 1)).sum(axis=0)
        if not chosen.any():
            return float("nan")
        shares = chosen[chosen > 0] / chosen.sum()
        return float(-(shares * np.log(shares)).sum() / np.log(len(values)))

    def view_following(self, views: np.ndarray) -> np.ndarray:
        """Share of panels in the requested view, int (B, 4)."""
        return np.mean(self.valid & (self.view == views), axis=1)


@lru_cache(maxsize=4)
def _templates(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Renderings (K, side*side*3) of all characters and views, an empty panel last, and their squared norms (K,)."""
    panels = [world.render_panel(c, v, side) for c in world.CHARACTERS for v in world.VIEWS]
    panels.append(np.ones((side, side, 3), dtype=np.float32))
    flat = np.stack(panels).reshape(len(panels), -1).astype(np.float32)
    return flat, np.einsum("kd,kd->k", flat, flat)


def read_grids(images: Sequence[Image.Image]) -> Reading:
    """Reads 2x2 grids of any square size from 32 px on (panels above 32 px are averaged down to 32 px)."""
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


def read_prompt(prompt: str) -> tuple[world.Character, tuple[int, ...]]:
    """The character that a toy prompt names, and the indices of its four views; raises ValueError for other prompts."""
    panels = "".join(re.escape(label) + r"(\w+ \w+)\. ?" for label in world.LABELS)
    found = re.fullmatch(r".* depicting an? ([^.]*)\..*?" + panels, prompt)
    words, *views = found.groups() if found else ("",)
    named = {name: word for word in words.split() for name, values in world.ATTRIBUTES.items() if word in values}
    character = world.Character(**dict.fromkeys(world.ATTRIBUTES, world.OPEN) | named)
    views = tuple(world.VIEW_INDEX.get(world.View(*text.split()), -1) for text in views)
    if not named or str(character) != words or -1 in views:
        raise ValueError(f"not a prompt of the shapes world: {prompt!r}")
    return character, views


Scorer = Callable[[Sequence[Image.Image], Sequence], np.ndarray]
# ``consistency_score`` and ``between_images`` of a second judge, so that an evaluation can have both.
other_consistency, other_between_images = ConsistencyScore, BetweenImages


def _reward(measure: Callable[[Reading, Sequence], np.ndarray]) -> Callable[[], Scorer]:
    """A reward factory; ``measure`` gets the reading of the images, and their items. Scores are float64 (B,)."""
    return lambda: lambda images, items: measure(read_grids(images), items)


oracle_consistency = _reward(lambda reading, items: reading.consistency())
oracle_alignment = _reward(lambda reading, items: reading.alignment([read_prompt(i.prompt)[0] for i in items]))
oracle_view = _reward(lambda reading, items: reading.view_following(np.array([read_prompt(i.prompt)[1] for i in items])))
oracle_valid = _reward(lambda reading, items: reading.valid.mean(axis=1))
oracle_distinct = _reward(lambda reading, items: reading.distinctness())


def oracle_between_images(named_only: bool = True) -> Scorer:
    """Reward factory: 1 − the share of an image's panels whose character other images of its group show as well.

    Float64 (B,), over all pairs of panels of two images; 1 for full prompts, as ``between_images``. ``named_only``: panels that
    do not show what the prompt names are like no others. For κ, every valid panel counts, as in ``oracle_consistency``.
    """

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        named = [read_prompt(item.prompt)[0] for item in items]
        reading, scores = read_grids(images), np.ones(len(images))
        shown = np.where(reading.shows(named) if named_only else reading.valid, reading.character, -1)
        for item_id in {i.item_id for i, c in zip(items, named) if c.left_open}:
            members = np.flatnonzero([item.item_id == item_id for item in items])
            counts = (shown[members, :, None] == np.arange(len(world.CHARACTERS))).sum(axis=1)
            equal = counts @ counts.T / 16  # (n, n)
            if len(members) > 1:
                scores[members] = 1 - (equal.sum(axis=1) - equal.diagonal()) / (len(members) - 1)
        return scores

    score.compares_images = True
    return score
