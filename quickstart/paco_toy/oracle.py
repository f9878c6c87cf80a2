"""The oracle: reads from pixels alone which character and view each panel of a grid shows.

Nothing trains on it. Each panel is compared with the rendering of every character in every view,
and with an empty panel. A panel that is nearest to empty, or further than ``INVALID_RMS`` from
everything, is invalid. The factories at the end are rewards for PaCo-GRPO, given by import path
(`paco_toy.oracle:oracle_consistency`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from paco_toy import world

INVALID_RMS = 0.12  # root mean square pixel distance, pixels in [0, 1]
_FIRST, _SECOND = np.triu_indices(4, k=1)  # the six pairs of panels


@dataclass(frozen=True)
class Reading:
    """What B grids of four panels show. Arrays (B, 4), panels row-major; results (B,) float64."""

    character: np.ndarray  # int, index into CHARACTERS; meaningless where invalid
    view: np.ndarray  # int, index into VIEWS; meaningless where invalid
    valid: np.ndarray  # bool

    def _valid_pairs(self) -> np.ndarray:
        return self.valid[:, _FIRST] & self.valid[:, _SECOND]

    def consistency(self) -> np.ndarray:
        """Share of panel pairs with the same character, both valid."""
        same = self.character[:, _FIRST] == self.character[:, _SECOND]
        return np.mean(self._valid_pairs() & same, axis=1)

    def distinctness(self) -> np.ndarray:
        """Share of panel pairs in different views, both valid."""
        different = self.view[:, _FIRST] != self.view[:, _SECOND]
        return np.mean(self._valid_pairs() & different, axis=1)

    def shows(self, named: Sequence[world.Character]) -> np.ndarray:
        """Which panels have every attribute that their prompt names: bool (B, 4)."""
        right = self.valid.copy()
        for attribute, values in world.ATTRIBUTES.items():
            shown = world.ATTRIBUTE_VALUES[attribute][self.character]
            for b, character in enumerate(named):
                value = getattr(character, attribute)
                if value != world.OPEN:
                    right[b] &= shown[b] == values.index(value)
        return right

    def alignment(self, named: Sequence[world.Character]) -> np.ndarray:
        """Share of panels that show what their prompt names."""
        return np.mean(self.shows(named), axis=1)

    def agreement(self, named: Sequence[world.Character]) -> np.ndarray:
        """Of pairs of panels that show what is named, the share that agrees on the rest.

        It is 0 where there is no such pair, and NaN for full prompts.
        """
        right = self.shows(named)
        pairs = right[:, _FIRST] & right[:, _SECOND]
        same = self.character[:, _FIRST] == self.character[:, _SECOND]
        num_same = (pairs & same).sum(axis=1)
        share = num_same / np.maximum(pairs.sum(axis=1), 1)
        is_open = [bool(character.left_open) for character in named]
        return np.where(is_open, share, np.nan)

    def choices(self, named: Sequence[world.Character], attribute: str) -> np.ndarray:
        """The value of an open attribute that most panels of an image have: float (B, V).

        Rows are one-hot, and a tie is divided. Only panels that show what is named count. A row is
        zero without such a panel, or where the attribute is not open.
        """
        is_open = np.array([attribute in character.left_open for character in named], dtype=bool)
        counted = self.shows(named) & is_open[:, None]
        shown = world.ATTRIBUTE_VALUES[attribute][self.character]
        values = np.arange(len(world.ATTRIBUTES[attribute]))
        votes = ((shown[:, :, None] == values) & counted[:, :, None]).sum(axis=1)
        most_votes = votes.max(axis=1, keepdims=True)
        wins = (votes == most_votes) & (most_votes > 0)
        return wins / np.maximum(wins.sum(axis=1, keepdims=True), 1)


def evenness(choices: np.ndarray) -> float:
    """Entropy of choices (B, V) over images, divided by the largest possible one.

    NaN if all choices are zero.
    """
    totals = choices.sum(axis=0)
    if not totals.any():
        return float("nan")
    shares = totals[totals > 0] / totals.sum()
    entropy = -(shares * np.log(shares)).sum()
    return float(entropy / np.log(len(totals)))


@lru_cache(maxsize=4)
def _templates(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Renderings (K, 3·side²) of all characters and views, an empty panel last.

    Their squared norms (K,) come second.
    """
    panels = [world.render_panel(c, v, side) for c in world.CHARACTERS for v in world.VIEWS]
    panels.append(np.ones((side, side, 3), dtype=np.float32))
    templates = np.stack(panels).reshape(len(panels), -1).astype(np.float32)
    return templates, np.einsum("kd,kd->k", templates, templates)


def read_grids(images: Sequence[Image.Image]) -> Reading:
    """Reads 2x2 grids of any square size from 32 px on; panels are averaged down to 32 px."""
    shape = (len(images), 4)
    reading = Reading(np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, bool))
    sides = np.array([min(image.width // 2, 32) for image in images])
    for side in np.unique(sides).tolist():
        templates, norms = _templates(side)
        numbers = np.flatnonzero(sides == side)
        panels = np.concatenate([_panels(images[number], side) for number in numbers])
        # |panel - template|² = |panel|² - 2 panel·template + |template|²
        panel_norms = np.einsum("pd,pd->p", panels, panels)
        squared = panel_norms[:, None] - 2 * panels @ templates.T + norms
        nearest = squared.argmin(axis=1)
        distances = np.maximum(squared[np.arange(len(panels)), nearest], 0)
        is_near = np.sqrt(distances / panels.shape[1]) <= INVALID_RMS
        is_empty = nearest == len(norms) - 1
        character, view = np.divmod(nearest, len(world.VIEWS))
        reading.character[numbers] = np.where(is_empty, -1, character).reshape(-1, 4)
        reading.view[numbers] = np.where(is_empty, -1, view).reshape(-1, 4)
        reading.valid[numbers] = (~is_empty & is_near).reshape(-1, 4)
    return reading


def _panels(image: Image.Image, side: int) -> np.ndarray:
    """The panels of a 2x2 grid at ``side`` px, (4, 3·side²) float32 in [0, 1]."""
    if image.size != (2 * side, 2 * side):
        image = image.resize((2 * side, 2 * side), Image.Resampling.BOX)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    return pixels.reshape(2, side, 2, side, 3).transpose(0, 2, 1, 3, 4).reshape(4, -1)


def read_prompt(prompt: str) -> world.Character:
    """The character that a prompt or theme of the shapes world names.

    Raises:
        ValueError: It is another prompt.
    """
    match = re.search(r" depicting an? ([^.]*)\.", prompt)
    description = match[1] if match else ""
    named = dict.fromkeys(world.ATTRIBUTES, world.OPEN)
    for word in description.split():
        for attribute, values in world.ATTRIBUTES.items():
            if word in values:
                named[attribute] = word
    character = world.Character(**named)
    if not any(named.values()) or str(character) != description:
        raise ValueError(f"not a prompt of the quickstart's shapes world: {prompt!r}")
    return character


Scorer = Callable[[Sequence[Image.Image], Sequence], np.ndarray]


def oracle_consistency() -> Scorer:
    """Reward factory: ``Reading.consistency``."""
    return lambda images, items: read_grids(images).consistency()


def oracle_distinct() -> Scorer:
    """Reward factory: ``Reading.distinctness``."""
    return lambda images, items: read_grids(images).distinctness()


def oracle_alignment() -> Scorer:
    """Reward factory: ``Reading.alignment`` with the items' prompts."""

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        named = [read_prompt(item.prompt) for item in items]
        return read_grids(images).alignment(named)

    return score


def oracle_between_images() -> Scorer:
    """Reward factory: how seldom two images of a group show the same character.

    Float64 (B,): 1 − the share of pairs of valid panels of two images that show the same character,
    as the mean over the other images of the group. 1 for full prompts, as ``between_images``.
    """

    def score(images: Sequence[Image.Image], items: Sequence) -> np.ndarray:
        reading = read_grids(images)
        shown = np.where(reading.valid, reading.character, -1)
        scores = np.ones(len(images))
        for item_id in {item.item_id for item in items if read_prompt(item.prompt).left_open}:
            members = np.flatnonzero([item.item_id == item_id for item in items])
            if len(members) == 1:
                continue
            # (n, 105): how many of an image's panels show each character
            counts = (shown[members, :, None] == np.arange(len(world.CHARACTERS))).sum(axis=1)
            equal = counts @ counts.T / 16  # of the 16 pairs of panels of two images
            with_others = equal.sum(axis=1) - equal.diagonal()
            scores[members] = 1 - with_others / (len(members) - 1)
        return scores

    score.compares_images = True
    return score


# Called for each prompt before a model is loaded.
oracle_alignment.check_item = lambda item, arguments: read_prompt(item.prompt)
oracle_between_images.check_item = oracle_alignment.check_item
