"""One reward out of those that prompt sets have under the same name.

Images are scored by the rewards of their set. The score of any other reward is absent: it does not
count as missing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_grpo.data.sets import PromptSet, prompt_sets
from paco_grpo.item import Item
from paco_grpo.names import without_keys
from paco_grpo.options import RunOptions
from paco_grpo.rewards.registry import CheckedReward, Reward, build_rewards, reward_weights
from paco_judge.identity import joined


def evaluation_rewards(
    options: RunOptions, device: torch.device | str, items: Sequence[Item]
) -> dict[str, Reward]:
    """The rewards of an evaluation on ``items``, which have answered. Raises UserError."""
    sets = prompt_sets(options)
    require_distinct_names(sets)
    built: dict[str, CheckedReward] = {}
    rewards = []
    for number, prompt_set in enumerate(sets):
        table = prompt_set.test
        rewards.append(build_rewards(table.weights, table.kwargs, device, built))
        of_set = [item for item in items if item.dataset == number]
        for reward in rewards[-1].values():
            reward.check_items(of_set)
            reward.check()
            reward.prove(of_set)
    return merge_sets(rewards, [prompt_set.name for prompt_set in sets])


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

    def weights(self) -> str | None:
        """As of ``CheckedReward``."""
        return joined([reward.weights() for reward in self.of_sets.values()])

    def identity(self) -> dict[str, Any]:
        """As of ``CheckedReward``, with the arguments and records of each set."""
        arguments = {}
        for number, reward in self.of_sets.items():
            of_set = reward.identity()
            arguments[str(number)] = [of_set["arguments"], of_set["record"]]
        record = without_keys(self.record)
        return {"arguments": arguments, "record": record, "weights": self.weights()}

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
