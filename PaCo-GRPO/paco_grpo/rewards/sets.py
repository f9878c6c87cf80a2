"""The rewards of a run's prompt sets: built, checked, and those of one name as one reward."""

import contextlib
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from typing_extensions import override

from paco_grpo.data.sets import PromptSet
from paco_grpo.distributed import main_decides
from paco_grpo.item import Item
from paco_grpo.names import without_keys
from paco_grpo.options import ConfigError
from paco_grpo.rewards.contract import Reward, RewardRun, Value
from paco_grpo.rewards.registry import CheckedReward, build_rewards, find_problems, reward_weights
from paco_judge.identity import joined


def rewards_of(
    sets: Sequence[PromptSet], device: torch.device | str, items: Mapping[str, Sequence[Item]]
) -> dict[str, dict[str, Reward]]:
    """The rewards of each split by short name. All have answered, and can score every item.

    Args:
        sets: The run's prompt sets.
        device: For the rewards that compute in this process.
        items: Split, ``train`` or ``test``, → its items of all prompt sets.

    Raises:
        ConfigError: All that is wrong.
        UserError: A reward cannot be built, or two have one short name.
    """
    for split in items:
        names: dict[str, float] = {}
        for prompt_set in sets:
            names |= prompt_set.table(split).weights
        reward_weights(names)  # no two of one short name
    built: dict[str, CheckedReward] = {}  # one for several uses is loaded once
    rewards: dict[str, list[dict[str, CheckedReward]]] = {split: [] for split in items}
    for prompt_set in sets:
        for split in items:
            table = prompt_set.table(split)
            rewards[split].append(build_rewards(table.weights, table.kwargs, device, built))
    for rewards_of_set in rewards.get("test", []):
        for name, reward in rewards_of_set.items():
            if reward.asks_people:
                raise ConfigError(
                    f"{name} asks people, which only training does: give config.test.reward_fn, or "
                    "test_reward_fn of a prompt set, rewards without it"
                )
    problems: list[str] = []
    for number, prompt_set in enumerate(sets):
        where = f"config.datasets.{prompt_set.name}: " if prompt_set.name else ""
        for split, items_of_split in items.items():
            items_of_set = [item for item in items_of_split if item.dataset == number]
            for problem in find_problems(rewards[split][number].values(), items_of_set):
                problems.append(f"{where}{problem}")
            is_open = any(item.metadata.get("open") for item in items_of_set)
            if split == "train" and prompt_set.train.weights.get("between_images") and not is_open:
                problems.append(
                    f"{where or 'config.train.'}reward_fn has between_images, but no training "
                    f"prompt of {prompt_set.folder} is open; `python dataset/fetch.py t2is "
                    "--open_twins` makes open prompts"
                )
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    names_of_sets = [prompt_set.name for prompt_set in sets]
    return {split: merge_sets(by_set, names_of_sets) for split, by_set in rewards.items()}


@contextlib.contextmanager
def begun(
    rewards: Iterable[Reward],
    folder: Path,
    accelerator: Accelerator | None = None,
    resumes: bool = False,
) -> Generator[None]:
    """The run of the rewards: it begins with the block, and its end closes them.

    Args:
        rewards: In the same order on every process.
        folder: Of the run.
        accelerator: Its processes; None: this one.
        resumes: As in ``RewardRun``.
    """
    process = accelerator.process_index if accelerator else 0
    processes = accelerator.num_processes if accelerator else 1

    def from_main(value: Value) -> Value:
        return main_decides(accelerator, lambda: value) if accelerator else value

    run = RewardRun(folder, process, processes, from_main, resumes)
    with contextlib.ExitStack() as closing:
        for reward in rewards:
            closing.callback(reward.close)
            reward.begin(run)
        yield


class RewardBySet(Reward):
    """The rewards of one name in the prompt sets that have it, as one reward.

    They share a factory; its arguments may differ. Images are scored by the rewards of their set.
    The score of any other reward is absent: it does not count as missing.
    """

    def __init__(self, name: str, of_sets: Mapping[int, CheckedReward], names: Sequence[str]):
        """``of_sets``: by number of the set. ``names``: of all sets."""
        first = next(iter(of_sets.values()))
        self.name = name
        self.of_sets = dict(of_sets)
        self.compares_images = first.compares_images
        self.asks_people = first.asks_people
        self.parallel_calls = first.parallel_calls
        records: dict[str, Any] = {}
        for number, reward in of_sets.items():
            self.parallel_calls = min(self.parallel_calls, reward.parallel_calls)
            if reward.record:
                records[names[number]] = reward.record
        self.record = records

    @override
    def applies_to(self, item: Item) -> bool:
        return item.dataset in self.of_sets

    @override
    def weights(self) -> str | None:
        return joined([reward.weights() for reward in self.of_sets.values()])

    @override
    def identity(self) -> dict[str, Any]:
        arguments = {}
        for number, reward in self.of_sets.items():
            identity = reward.identity()
            arguments[str(number)] = [identity["arguments"], identity["record"]]
        record = without_keys(self.record)
        return {"arguments": arguments, "record": record, "weights": self.weights()}

    @override
    def begin(self, run: RewardRun) -> None:
        for reward in self.of_sets.values():
            reward.begin(run)

    @override
    def close(self) -> None:
        for reward in self.of_sets.values():
            reward.close()

    @override
    def show(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> None:
        self.of_sets[items[0].dataset].show(images, items, seeds, epoch)

    @override
    def is_waiting(self) -> bool:
        waiting = [reward.is_waiting() for reward in self.of_sets.values()]
        return any(waiting)

    @override
    def follow(self, phase: str, done: int, total: int) -> None:
        for reward in self.of_sets.values():
            reward.follow(phase, done, total)

    @override
    def __call__(
        self,
        images: Sequence[Image.Image],
        items: Sequence[Item],
        seeds: Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> np.ndarray:
        scores = np.full(len(images), math.nan)
        for number, reward in self.of_sets.items():
            rows = [row for row, item in enumerate(items) if item.dataset == number]
            if rows:
                images_of_set = [images[row] for row in rows]
                items_of_set = [items[row] for row in rows]
                seeds_of_set = None if seeds is None else [seeds[row] for row in rows]
                scores[rows] = reward(images_of_set, items_of_set, seeds_of_set, epoch)
        return scores


def merge_sets(
    rewards: Sequence[Mapping[str, CheckedReward]], names: Sequence[str]
) -> dict[str, Reward]:
    """The rewards of all prompt sets by short name.

    Args:
        rewards: Short name → reward, of each set.
        names: Of the sets.
    """
    by_name: dict[str, dict[int, CheckedReward]] = {}
    for number, rewards_of_set in enumerate(rewards):
        for name, reward in rewards_of_set.items():
            by_name.setdefault(name, {})[number] = reward
    merged: dict[str, Reward] = {}
    for name, of_sets in by_name.items():
        distinct = set(of_sets.values())
        if len(of_sets) == len(rewards) and len(distinct) == 1:
            (merged[name],) = distinct
        else:
            merged[name] = RewardBySet(name, of_sets, names)
    return merged
