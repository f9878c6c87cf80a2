"""The rewards of a run: those it trains on, those of the test, and those that only look on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ml_collections import ConfigDict

from paco_grpo.rewards.registry import Reward, build_rewards, short_name
from paco_grpo.training.journal import JournaledReward, ScoreJournal
from paco_grpo.types import Item


@dataclass(frozen=True)
class RewardSets:
    """Short name → reward. One that several sets share is built once."""

    train: Mapping[str, Reward]
    test: Mapping[str, Reward]
    watched: Mapping[str, Reward]  # of the test alone, on training samples (train.watch_test_rewards)


def test_reward_kwargs(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Name → arguments of the rewards of the test; what it does not say is as in training."""
    train, test = (config[group].reward_fn_kwargs.to_dict() for group in ("train", "test"))
    names = config.test.reward_fn.to_dict() or config.train.reward_fn.to_dict()
    return {name: test.get(name, train.get(name, {})) for name in names}


def build_reward_sets(
    config: ConfigDict,
    device: torch.device,
    journal: ScoreJournal,
    train_items: Sequence[Item] = (),
    test_items: Sequence[Item] = (),
) -> RewardSets:
    """Build all rewards of ``config`` and ask each whether it can work (is the judge there? can every item have a score?).

    Raises:
        RewardError, JudgeError: One message that names the reward or the item.
    """
    built: dict[str, Reward] = {}

    def build(name: str, kwargs: Mapping) -> Reward:
        identity = f"{name} {json.dumps(kwargs, sort_keys=True, default=str)}"
        if identity not in built:  # the same scorer for training and test: loaded once
            (reward,) = build_rewards({name: 1.0}, {name: kwargs}, device).values()
            built[identity] = JournaledReward(reward, identity, journal)
        return built[identity]

    kwargs = config.train.reward_fn_kwargs.to_dict()
    train = {short_name(name): build(name, kwargs.get(name, {})) for name in config.train.reward_fn}
    test = {short_name(name): build(name, its) for name, its in test_reward_kwargs(config).items()}
    for reward in built.values():
        reward.check()
    for rewards, items in ((train, train_items), (test, test_items)):
        for reward in rewards.values():
            reward.check_items(items)
    only_test = {name: reward for name, reward in test.items() if name not in train}
    return RewardSets(train, test, only_test if config.train.watch_test_rewards else {})
