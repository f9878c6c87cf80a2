"""A run: its parts, its log, its end."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import set_seed

from paco_grpo.advantages.groups import SetRewards
from paco_grpo.data.sets import PromptSet
from paco_grpo.distributed import same_outcome
from paco_grpo.monitoring.health import ReferenceProbe
from paco_grpo.monitoring.trackers import MetricsFile, Tracker, finite_numbers
from paco_grpo.objectives import Objective
from paco_grpo.options import RunOptions
from paco_grpo.rewards.contract import Reward
from paco_grpo.training.checkpoints import Checkpoints
from paco_grpo.training.references import References
from paco_grpo.training.sample import Sampler
from paco_grpo.training.state import Plan, TrainState
from paco_grpo.training.update import Updater
from paco_grpo.types import Item, Stream


@dataclass(frozen=True)
class RunRewards:
    """The rewards of a run by short name, of all its prompt sets."""

    train: Mapping[str, Reward]
    test: Mapping[str, Reward]

    def all(self) -> dict[str, Reward]:
        """All of them; those of evaluations that differ are called ``test NAME``."""
        rewards = dict(self.train)
        for name, reward in self.test.items():
            if reward is not self.train.get(name):
                rewards[f"test {name}"] = reward
        return rewards


@dataclass
class Run:
    """The parts of a run."""

    options: RunOptions
    plan: Plan
    folder: Path
    resumes_from: Path | None  # a checkpoint
    proof: Mapping[str, Any]  # that the policy gives its pipeline's images (``training/proof.py``)
    objective: Objective
    prompt_sets: list[PromptSet]
    references: References
    train_items: list[Item]  # of all prompt sets
    test_items: list[Item]
    rewards: RunRewards
    set_rewards: list[SetRewards]  # what each prompt set is trained on
    state: TrainState
    sampler: Sampler
    updater: Updater
    checkpoints: Checkpoints
    probe: ReferenceProbe | None
    metrics: MetricsFile
    tracker: Tracker | None  # on the main process
    # Keeps other trainers out of ``folder``, and the rewards open, until it is closed.
    claim: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def accelerator(self) -> Accelerator:
        """The processes."""
        return self.state.strategy.accelerator

    def seed_generators(self) -> None:
        """Seed the global random generators for users' rewards; our code does not use them."""
        process = self.accelerator.process_index
        words = [Stream.GLOBAL, self.options.seed, self.state.epoch, process]
        set_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))

    def follow(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Tell the trained rewards what is done; see ``rewards.contract.Attributes``."""
        for reward in self.rewards.train.values():
            reward.follow(phase, done, total)

    def log(self, phase: str, metrics: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl and log it to the tracker (main process)."""
        state = self.state
        with same_outcome(self.accelerator):
            if self.accelerator.is_main_process:
                head = {
                    "epoch": state.epoch,
                    "step": state.optimizer_steps,
                    "train_time": state.train_seconds,
                    "phase": phase,
                }
                self.metrics.write(head | dict(metrics))
            if self.tracker is not None:
                self.tracker.log(finite_numbers(metrics), state.epoch)

    def close(self) -> None:
        """Close the tracker and the rewards, and let another trainer have the folder."""
        self.references.close()
        with contextlib.closing(self.tracker) if self.tracker else contextlib.nullcontext():
            self.claim.close()
