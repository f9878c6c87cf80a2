"""The rewards of a run: built and checked, also where prompt sets have different ones.

Images are scored by the rewards of their set. The score of any other reward is absent: it does not
count as missing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_grpo.advantages.aggregation import get_aggregate_fn
from paco_grpo.advantages.groups import SetRewards, weighted_sum
from paco_grpo.data.sets import PromptSet, RewardTable, prompt_sets
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
class RunRewards:
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


def build_run_rewards(
    options: RunOptions,
    device: torch.device | str,
    items_of_sets: Sequence[tuple[Sequence[Item], Sequence[Item]]],
) -> RunRewards:
    """Build all rewards and check each: does the judge answer, can every item be scored?

    ``items_of_sets``: training and test items of each prompt set. Raises ConfigError.
    """
    sets = prompt_sets(options)
    require_distinct_names(sets)
    built: dict[str, CheckedReward] = {}  # the same one for several uses is loaded once
    trained = []
    tested = []
    problems = []
    for prompt_set, (train_items, test_items) in zip(sets, items_of_sets, strict=True):
        trained.append(_build_table(prompt_set.train, device, built))
        tested.append(_build_table(prompt_set.test, device, built))
        where = f"config.datasets.{prompt_set.name}: " if prompt_set.name else ""
        for rewards, items in ((trained[-1], train_items), (tested[-1], test_items)):
            for problem in find_problems(rewards.values(), items):
                problems.append(f"{where}{problem}")
        has_open = any(item.metadata.get("open") for item in train_items)
        if prompt_set.train.weights.get("between_images") and not has_open:
            problems.append(
                f"{where or 'config.train.'}reward_fn has between_images, but no training prompt "
                f"of {prompt_set.folder} is open; `python dataset/fetch.py t2is --open_twins` "
                "makes open prompts"
            )
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    names = [prompt_set.name for prompt_set in sets]
    return RunRewards(merge_sets(trained, names), merge_sets(tested, names))


def training_rewards(prompt_set: PromptSet, options: RunOptions) -> SetRewards:
    """What a prompt set is trained on. Raises ConfigError: The aggregation cannot be used."""
    weights = {}
    for name, weight in reward_weights(prompt_set.train.weights).items():
        if weight:
            weights[name] = weight
    try:
        aggregate_fn = get_aggregate_fn(
            options.train.aggregate_fn, weights, options.sample.global_std
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    aggregate_fn = aggregate_fn or partial(weighted_sum, weights)
    weights_of_function = getattr(aggregate_fn, "reward_weights", None)
    if prompt_set.name and weights_of_function is not None:
        others = [name for name in weights if weights_of_function[name] != weights[name]]
        if others:
            raise ConfigError(
                f"config.train.aggregate_fn has another weight of {', '.join(others)} than "
                f"config.datasets.{prompt_set.name}; give it no reward_weights, such as "
                "'product_aggregate_fn'"
            )
    return SetRewards(prompt_set.name, weights, aggregate_fn)


def evaluation_rewards(
    options: RunOptions, device: torch.device | str, items: Sequence[Item]
) -> dict[str, Reward]:
    """The rewards of an evaluation on ``items``, which have answered. Raises UserError."""
    sets = prompt_sets(options)
    require_distinct_names(sets)
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

    They share a factory; its arguments may differ.
    """

    def __init__(self, name: str, of_sets: Mapping[int, CheckedReward], names: Sequence[str]):
        """``of_sets``: by number of the set. ``names``: of all sets."""
        first = next(iter(of_sets.values()))
        self.name = name
        self.of_sets = dict(of_sets)
        self.compares_images = first.compares_images
        self.parallel_calls = first.parallel_calls
        self.record: dict[str, Any] = {}
        for number, reward in of_sets.items():
            self.parallel_calls = min(self.parallel_calls, reward.parallel_calls)
            if reward.record:
                self.record[names[number]] = reward.record

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
    by_name: dict[str, dict[int, CheckedReward]] = {}
    for number, of_set in enumerate(rewards):
        for name, reward in of_set.items():
            by_name.setdefault(name, {})[number] = reward
    merged: dict[str, CheckedReward | RewardBySet] = {}
    for name, of_sets in by_name.items():
        distinct = set(of_sets.values())
        if len(of_sets) == len(rewards) and len(distinct) == 1:
            (merged[name],) = distinct
        else:
            merged[name] = RewardBySet(name, of_sets, names)
    return merged


def require_distinct_names(sets: Sequence[PromptSet]) -> None:
    """Raise UserError if two rewards of training or evaluation have one short name."""
    trained: dict[str, float] = {}
    tested: dict[str, float] = {}
    for prompt_set in sets:
        trained |= prompt_set.train.weights
        tested |= prompt_set.test.weights
    reward_weights(trained)
    reward_weights(tested)


def watched_rewards(tables: Sequence[RewardTable]) -> list[str]:
    """Short names of the rewards that have no weight in any prompt set."""
    largest: dict[str, float] = {}
    for table in tables:
        for name, weight in table.weights.items():
            largest[name] = max(abs(weight), largest.get(name, 0.0))
    return [short_name(name) for name, weight in largest.items() if weight == 0]
