"""The training half of an epoch: the objective on shuffled micro-batches, then the optimizer steps."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from ml_collections import ConfigDict

from paco_grpo.objectives import Objective
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.rollout import recompute_old
from paco_grpo.training.collect import Rollouts
from paco_grpo.training.engine import Engine
from paco_grpo.training.processes import any_process
from paco_grpo.types import RolloutRecord

logger = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite; raised before the optimizer changes anything."""


@dataclass
class Updater:
    """One process's part in the optimizer steps of an epoch; the numbers do not depend on how many there are.

    Attributes:
        policy: Evaluated with gradient.
        objective: ``(record, policy, config) -> (loss_sum, metrics)``.
        optimizer: Of ``parameters``.
        parameters: Trainable.
        accelerator: The processes.
        engine: How they share the work.
        config: The run's.
        gradient_steps: Optimizer steps per pass over the samples.
        after_step: Called with the step number after each optimizer step (EMA).
        step: Optimizer steps taken so far.
        recompute: Old log-probabilities are computed anew before training; None = not decided yet.
    """

    policy: Policy
    objective: Objective
    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.nn.Parameter]
    accelerator: Accelerator
    engine: Engine
    config: ConfigDict
    gradient_steps: int
    after_step: Callable[[int], None]
    step: int = 0
    recompute: bool | None = None

    def prepare(self, rollouts: Rollouts) -> None:
        """What comes before ``run`` and needs no scores: old log-probabilities computed anew, in place, where wanted."""
        self._old_log_prob(rollouts)

    def run(
        self, rollouts: Rollouts, positions: np.ndarray, advantages: np.ndarray, kept: np.ndarray, epoch: int
    ) -> dict[str, float]:
        """Train on one epoch's samples.

        Args:
            rollouts: What this process sampled, after ``prepare``.
            positions: (n,) global position of each local sample.
            advantages: (N,) over all processes, by global position.
            kept: (N,) bool over all processes; the others are left out, the loss is divided by the global number kept.
            epoch: For the shuffling and for messages.

        Returns:
            Metrics over the epoch, equal on every process.

        Raises:
            NonFiniteError: On every process, before the update.
        """
        number_at = {int(position): number for number, position in enumerate(positions)}
        collected: list[dict[str, float]] = []
        for inner in range(self.config.train.num_inner_epochs):
            for chunk in self._chunks(len(kept), epoch, inner):
                chosen = chunk[kept[chunk]]
                if len(chosen) == 0:
                    continue
                mine = [number_at[p] for p in chosen.tolist() if p in number_at]
                sums: dict[str, float] = {}
                problem = ""
                batches = rollouts.batches(mine, self.config.train.batch_size)
                turns = self.engine.turns(len(batches), backward=True)
                for turn in range(turns):
                    idle = turn >= len(batches)
                    numbers = rollouts.samples[0][:1] if idle else batches[turn]
                    record = self._with_advantages(rollouts.record(numbers), advantages[positions[numbers]], idle)
                    found = self._backward(record, len(chosen), sums, last=turn == turns - 1)
                    if found and not problem:
                        problem = f"{found} in the batch of samples {positions[numbers].tolist()}"
                    if problem and not self.engine.joint_backwards:
                        break
                sums["grad_norm"] = self._optimizer_step(problem, epoch) / self.accelerator.num_processes
                collected.append(sums)
        return _means(collected)

    def _chunks(self, count: int, epoch: int, inner: int) -> list[np.ndarray]:
        """Global positions behind each optimizer step: the same whatever the number of processes.

        The epoch's order is already shuffled, so the first pass takes it as it is (every process then has its equal
        share of every step); further passes shuffle again.
        """
        order = np.arange(count)
        if inner > 0:
            order = np.random.default_rng([15, self.config.seed, epoch, inner]).permutation(count)
        return np.array_split(order, self.gradient_steps)

    def _with_advantages(self, record: RolloutRecord, advantages: np.ndarray, idle: bool = False) -> RolloutRecord:
        """``idle``: the samples are there for the sake of other processes and count for nothing."""
        values = torch.as_tensor(advantages, dtype=torch.float32, device=record.item_ids.device)
        weights = torch.zeros_like(values) if idle else torch.ones_like(values)
        return dataclasses.replace(record, advantages=values, weights=weights)

    def _backward(self, record: RolloutRecord, kept: int, sums: dict[str, float], last: bool = True) -> str:
        """Gradient of one micro-batch, one noise step at a time (activations of one step are held at once).

        Returns:
            What is wrong with the loss, if anything.
        """
        parts, problem = self._steps(record), ""
        for number, part in enumerate(parts, 1):
            loss, metrics = self.objective(part, self.policy, self.config)
            loss = loss / (len(parts) * kept)
            if not torch.isfinite(loss):
                problem = problem or f"the loss is {loss.item()}"
                if not self.engine.joint_backwards:
                    return problem
            self.engine.backward(loss, last and number == len(parts))
            sums["loss"] = sums.get("loss", 0.0) + loss.item()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(part) / (len(parts) * kept)
        return problem

    def _steps(self, record: RolloutRecord) -> list[RolloutRecord]:
        steps = record.step_index.tolist()
        wanted = self.config.train.timesteps
        chosen = [i for i, step in enumerate(steps) if wanted is None or step in wanted]
        if len(steps) <= 1 or self.config.train.loss_type == "nft":
            return [record]
        return [record.select_steps([i]) for i in chosen]

    def _optimizer_step(self, problem: str, epoch: int) -> float:
        """Step, unless something is not finite anywhere; returns the gradient norm before clipping."""
        finite, norm = self.engine.finish_gradients(self.parameters, not problem, self.config.train.max_grad_norm)
        if not finite or not math.isfinite(norm):
            self.engine.drop_gradients(self.optimizer)
            what = problem or (
                "the loss is not finite on another process" if not finite else "the gradient is not finite"
            )
            raise NonFiniteError(
                f"{what}, in epoch {epoch + 1} before optimizer step {self.step + 1}; the weights are as they were "
                "before it. Lower config.train.learning_rate, or look at the rewards of these samples."
            )
        warmup = self.config.train.lr_warmup_steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.train.learning_rate * min(1.0, (self.step + 1) / max(1, warmup))
        self.engine.step(self.optimizer)
        self.step += 1
        self.after_step(self.step)
        return norm

    # --- old log-probabilities in low precision ---------------------------------------------------------------------

    def _old_log_prob(self, rollouts: Rollouts) -> None:
        """Recompute what the rollout recorded where low precision makes the first ratio differ from 1 (method §6)."""
        mode = self.config.train.old_log_prob
        if self.config.train.loss_type == "nft" or mode == "rollout":
            return
        if self.recompute is None:
            self.recompute = mode == "recompute" or self._deviates(rollouts)
        if self.recompute:
            self._recompute(rollouts)

    def _recompute(self, rollouts: Rollouts) -> None:
        size, done = self.config.train.batch_size, 0
        for index, record in enumerate(rollouts.records):
            rows = record.conditioning
            batches = [record.select(slice(i, i + size)) for i in range(0, len(record), size)]
            full = [
                dataclasses.replace(b, conditioning=rollouts.conditioning.select(b.conditioning.rows)) for b in batches
            ]
            anew = RolloutRecord.cat([recompute_old(self.policy, b) for b in full])
            rollouts.records[index] = dataclasses.replace(anew, conditioning=rows)
            done += len(full)
        for _ in range(self.engine.turns(done) - done):
            recompute_old(self.policy, rollouts.record(rollouts.samples[0][:1]))

    def _deviates(self, rollouts: Rollouts) -> bool:
        """Whether the ratio of the first micro-batch, which should be 1, is off by a quarter of the clip range."""
        if self.policy.dtype == torch.float32 and not self.config.speed.compile:
            return False
        _, record = next(rollouts.micro_batches(rollouts.samples[0].tolist(), self.config.train.batch_size))
        ratio = (recompute_old(self.policy, record).log_prob - record.log_prob).exp()
        deviation = (ratio - 1).abs().mean().item()
        limit = self.config.train.clip_range / 4
        off = any_process(self.accelerator, deviation > limit or not math.isfinite(deviation))
        logger.info("first ratio deviates from 1 by %.1e (a quarter of clip_range is %.1e)", deviation, limit)
        if off:
            logger.warning(
                "mixed_precision=%s, speed.compile=%s: old log-probabilities are recomputed before each update (one more "
                "forward); config.train.old_log_prob='rollout' forbids it, mixed_precision='no' makes it needless",
                self.config.mixed_precision, self.config.speed.compile,
            )  # fmt: skip
        return off


def _means(collected: list[dict[str, float]]) -> dict[str, float]:
    """Average over optimizer steps of what all processes summed up."""
    steps = len(collected)
    totals: dict[str, float] = {}
    for sums in gather_object([collected]):
        for part in sums:
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
    return {name: value / steps for name, value in totals.items()}
