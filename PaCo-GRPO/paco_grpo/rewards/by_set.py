"""Rewards of a run whose prompt sets have different ones.

A reward that a set does not have is absent: its images are not shown to it, have no score by it, and
do not count as missing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.data.sets import RewardTable
from paco_grpo.item import Item
from paco_grpo.rewards.registry import CheckedReward, reward_weights, short_name


class RewardBySet:
    """The rewards of one name in the prompt sets that have it, as one reward.

    Their factory is the same, its arguments may differ.
    """

    def __init__(self, name: str, of_sets: Mapping[int, CheckedReward], names: Sequence[str]):
        """``of_sets``: by number of the set. ``names``: of all sets."""
        rewards = list(of_sets.values())
        self.name = name
        self.of_sets = dict(of_sets)
        self.compares_images = rewards[0].compares_images
        self.parallel_calls = min(reward.parallel_calls for reward in rewards)
        records = {names[number]: reward.record for number, reward in of_sets.items()}
        self.record = {key: value for key, value in records.items() if value} or None

    def applies_to(self, item: Item) -> bool:
        """Whether the item's prompt set has this reward."""
        return item.dataset in self.of_sets

    def identity(self) -> list[Any]:
        """As of ``CheckedReward``."""
        return [[number, reward.identity()] for number, reward in self.of_sets.items()]

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing, by the reward of each item's set."""
        scores = np.full(len(images), math.nan)
        for number, reward in self.of_sets.items():
            rows = [row for row, item in enumerate(items) if item.dataset == number]
            if rows:
                scores[rows] = reward([images[row] for row in rows], [items[row] for row in rows])
        return scores


def merge_sets(
    rewards: Sequence[Mapping[str, CheckedReward]], names: Sequence[str]
) -> dict[str, CheckedReward | RewardBySet]:
    """The rewards of all prompt sets by short name.

    Args:
        rewards: Short name → reward, of each set.
        names: Of the sets.
    """
    merged: dict[str, CheckedReward | RewardBySet] = {}
    for name in dict.fromkeys(name for of_set in rewards for name in of_set):
        of_sets = {number: r[name] for number, r in enumerate(rewards) if name in r}
        first = next(iter(of_sets.values()))
        is_common = len(of_sets) == len(rewards)
        if is_common and all(reward is first for reward in of_sets.values()):
            merged[name] = first
        else:
            merged[name] = RewardBySet(name, of_sets, names)
    return merged


def require_distinct_names(tables: Sequence[RewardTable]) -> None:
    """Raise UserError if two rewards, of one prompt set or of several, have one short name."""
    everything: dict[str, float] = {}
    for table in tables:
        everything |= table.weights
    reward_weights(everything)


def watched_rewards(tables: Sequence[RewardTable]) -> list[str]:
    """Short names of the rewards that have no weight in any prompt set."""
    names = dict.fromkeys(name for table in tables for name in table.weights)
    watched = []
    for name in names:
        if not any(table.weights.get(name) for table in tables):
            watched.append(short_name(name))
    return watched
