"""The rewards of a run: built and checked, also where prompt sets have different ones.

A reward that a set does not have is absent: its images are not shown to it, have no score by it, and
do not count as missing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_grpo.data.sets import RewardTable, prompt_sets
from paco_grpo.item import Item
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import (
    CheckedReward,
    Reward,
    find_problems,
    reward_weights,
    short_name,
    write_records,
)


@dataclass(frozen=True)
class RewardSets:
    """The rewards of a run by short name, of all its prompt sets."""

    train: Mapping[str, Reward]
    test: Mapping[str, Reward]

    def write_records(self, folder: Path) -> None:
        """Write ``questions.json``."""
        records = dict(self.train)
        for name, reward in self.test.items():
            if reward is not self.train.get(name):
                records[f"test {name}"] = reward
        write_records(records, folder)


def build_reward_sets(
    options: RunOptions,
    device: torch.device | str,
    items_of_sets: Sequence[tuple[Sequence[Item], Sequence[Item]]],
) -> RewardSets:
    """Build all rewards and check each: does the judge answer, can every item be scored?

    ``items_of_sets``: training and test items of each prompt set. Raises ConfigError.
    """
    sets = prompt_sets(options)
    require_distinct_names([prompt_set.train for prompt_set in sets])
    require_distinct_names([prompt_set.test for prompt_set in sets])
    built: dict[str, CheckedReward] = {}  # the same one for several uses is loaded once
    trained = []
    tested = []
    problems = []
    for prompt_set, (train_items, test_items) in zip(sets, items_of_sets, strict=True):
        trained.append(_build_table(prompt_set.train, device, built))
        tested.append(_build_table(prompt_set.test, device, built))
        uses = [(reward, train_items) for reward in trained[-1].values()]
        uses += [(reward, test_items) for reward in tested[-1].values()]
        where = f"config.datasets.{prompt_set.name}: " if prompt_set.name else ""
        problems += [f"{where}{problem}" for problem in find_problems(uses)]
        has_open = any(item.metadata.get("open") for item in train_items)
        if prompt_set.train.weights.get("between_images") and not has_open:
            problems.append(
                f"{where or 'config.train.'}reward_fn has between_images, but no training prompt "
                f"of {prompt_set.folder} is open; `python dataset/fetch.py t2is --open_twins` "
                "makes open prompts"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    names = [prompt_set.name for prompt_set in sets]
    return RewardSets(merge_sets(trained, names), merge_sets(tested, names))


def evaluation_rewards(
    options: RunOptions, device: torch.device | str, items: Sequence[Item]
) -> dict[str, Reward]:
    """The rewards of an evaluation on ``items``, which have answered. Raises UserError."""
    sets = prompt_sets(options)
    require_distinct_names([prompt_set.test for prompt_set in sets])
    built: dict[str, CheckedReward] = {}
    rewards = []
    for number, prompt_set in enumerate(sets):
        rewards.append(_build_table(prompt_set.test, device, built))
        of_set = [item for item in items if item.dataset == number]
        for reward in rewards[-1].values():
            reward.check()
            reward.check_items(of_set)
    return merge_sets(rewards, [prompt_set.name for prompt_set in sets])


def _build_table(
    table: RewardTable, device: torch.device | str, built: dict[str, CheckedReward]
) -> dict[str, CheckedReward]:
    """The rewards of a table by short name; ``built`` has those that exist, and gets the others."""
    rewards = {}
    for name, kwargs in table.kwargs.items():
        identity = f"{name} {json.dumps(kwargs, sort_keys=True, default=str)}"
        if identity not in built:
            built[identity] = CheckedReward(name, kwargs, device)
        rewards[short_name(name)] = built[identity]
    return rewards


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
