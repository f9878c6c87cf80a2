"""The rewards of a run: those it trains on, those of the test, and those that only look on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from ml_collections import ConfigDict

from paco_grpo.rewards.registry import Reward, build_rewards, short_name
from paco_grpo.training.journal import JournaledReward, ScoreJournal


@dataclass(frozen=True)
class RewardSets:
    """Short name → reward. One that several sets share is built once."""

    train: Mapping[str, Reward]
    test: Mapping[str, Reward]
    watched: Mapping[str, Reward]  # of the test alone, on training samples (train.watch_test_rewards)


def build_reward_sets(config: ConfigDict, device: torch.device, journal: ScoreJournal) -> RewardSets:
    """Build all rewards of ``config`` and ask each whether it can work (is the judge there?).

    Raises:
        RewardError, JudgeError: One message that names the reward.
    """
    train_kwargs, test_kwargs = (config[group].reward_fn_kwargs.to_dict() for group in ("train", "test"))
    train_fn = config.train.reward_fn.to_dict()
    test_fn = config.test.reward_fn.to_dict() or train_fn

    def build(name: str, kwargs: Mapping) -> dict[str, Reward]:
        (built,) = build_rewards({name: 1.0}, {name: kwargs}, device).values()
        return {short_name(name): JournaledReward(built, [name, dict(kwargs)], journal)}

    train: dict[str, Reward] = {}
    for name in train_fn:
        train |= build(name, train_kwargs.get(name, {}))
    test: dict[str, Reward] = {}
    for name in test_fn:
        kwargs = test_kwargs.get(name, train_kwargs.get(name, {}))
        if name in train_fn and kwargs == train_kwargs.get(name, {}):
            test[short_name(name)] = train[short_name(name)]  # the same scorer: loaded once
        else:
            test |= build(name, kwargs)
    for reward in {id(reward): reward for reward in [*train.values(), *test.values()]}.values():
        reward.check()
    only_test = {name: reward for name, reward in test.items() if name not in train}
    return RewardSets(train, test, only_test if config.train.watch_test_rewards else {})
