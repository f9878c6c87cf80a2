"""The training half of an epoch: the objective on micro-batches, then the optimizer steps."""

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from paco_grpo.checkpoint.state import TrainState
from paco_grpo.distributed.processes import any_process
from paco_grpo.objectives import Objective, Step
from paco_grpo.options import RunOptions
from paco_grpo.policies import lora
from paco_grpo.sampling.denoise import recompute_old
from paco_grpo.training.sample import Rollouts
from paco_grpo.types import to_device

logger = logging.getLogger(__name__)

_ORDER, _STEPS, _SHARED = 15, 16, 17  # first words of random streams
_MAX = "_max"  # metrics of which the largest is reported, not the mean


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite, before the optimizer step, or (``weights_changed``) a weight after it."""

    def __init__(self, message: str, weights_changed: bool = False) -> None:
        super().__init__(message)
        self.weights_changed = weights_changed


@dataclass(frozen=True)
class Pass:
    """One pass over an epoch's samples."""

    rollouts: Rollouts
    advantages: np.ndarray  # (N,) over all processes, by global position
    epoch: int
    inner: int = 0  # passes over these samples before this one


@dataclass
class Updater:
    """One process's part in the optimizer steps of an epoch."""

    state: TrainState  # its parameters, optimizer and counters change
    objective: Objective
    options: RunOptions
    gradient_steps: int  # optimizer steps per pass over the samples

    def prepare(self, rollouts: Rollouts) -> None:
        """Recompute old log-probabilities in place where low precision makes the first ratio differ from 1."""
        state, mode, size = (
            self.state,
            self.options.train.old_log_prob,
            self.options.train.batch_size,
        )
        if not self.objective.needs_noise_steps or mode == "rollout":
            return
        batches = rollouts.batches(range(len(rollouts.samples)), size)
        if state.recompute_old is None:
            state.recompute_old = mode == "recompute" or self._deviates(rollouts, batches[0])
        if not state.recompute_old:
            return
        for numbers, is_dummy in state.strategy.synced_batches(batches, np.array([0])):
            recomputed = recompute_old(
                state.policy, rollouts.stack(numbers), self.options.speed.compile
            )
            for place, number in enumerate([] if is_dummy else numbers):
                steps = [step.select(slice(place, place + 1)) for step in recomputed.noise_steps]
                rollouts.samples[number] = dataclasses.replace(
                    rollouts.samples[number], noise_steps=steps
                )

    def _deviates(self, rollouts: Rollouts, numbers: np.ndarray) -> bool:
        """Whether log-probabilities recomputed for the micro-batch ``numbers`` are off by more than the objective's limit."""
        policy, options = self.state.policy, self.options
        if policy.dtype == torch.float32 and not options.speed.compile:
            return False
        steps = self._steps(Pass(rollouts, np.zeros(len(rollouts.item_ids)), epoch=0), numbers)
        with torch.set_grad_enabled(options.speed.compile):  # as in ``recompute_old``
            each = [
                self.objective.first_deviation(step, policy, options.train).detach()
                for step in steps
            ]
        deviation = torch.stack(each, dim=1).mean().item()
        off = any_process(
            self.state.strategy.accelerator, deviation > 1 or not math.isfinite(deviation)
        )
        if off:
            logger.warning(
                "old log-probabilities are recomputed before each update (config.train.old_log_prob): "
                "those of the first samples are off by %.1e times the limit", deviation,
            )  # fmt: skip
        return off

    def run(
        self,
        rollouts: Rollouts,
        advantages: np.ndarray,
        kept: np.ndarray,
        epoch: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Train on one epoch's samples; returns metrics over the epoch, equal on every process.

        Args:
            rollouts: What this process sampled, after ``prepare``.
            advantages: (N,) over all processes, by global position.
            kept: (N,) bool; the others are left out, the loss is divided by the global number kept.
            epoch: For random streams.
            should_stop: Asked before each micro-batch of the first optimizer step; later the epoch is finished.
        """
        local = {int(position): number for number, position in enumerate(rollouts.positions)}
        collected: list[dict[str, float]] = []
        for inner in range(self.options.train.num_inner_epochs):
            data = Pass(rollouts, advantages, epoch, inner)
            for chunk in self._chunks(rollouts.item_ids, epoch, inner):
                if chosen := chunk[kept[chunk]].tolist():
                    mine = [local[position] for position in chosen if position in local]
                    batches = rollouts.batches(mine, self.options.train.batch_size)
                    sums = self._backward(
                        data, batches, len(chosen), None if collected else should_stop
                    )
                    collected.append(self._optimizer_step(sums, epoch))
        self._check_weights()
        self._follow(every_step=False)
        totals: dict[str, list[float]] = defaultdict(list)
        for sums in gather_object(collected):
            for name, value in sums.items():
                totals[name].append(value)
        return {
            n: max(each) if n.endswith(_MAX) else sum(each) / len(collected)
            for n, each in totals.items()
        }

    def _follow(self, every_step: bool) -> None:
        for snapshot in self.objective.snapshots:
            if snapshot.every_step == every_step:
                lora.blend_snapshot(
                    self.state.policy,
                    snapshot.name,
                    snapshot.decay(self.state.step, self.options.train),
                )

    def _check_weights(self) -> None:
        """Raise unless all weights are finite: moments of the optimizer can spoil them after a finite gradient."""
        local = [
            p.to_local() if isinstance(p, DTensor) else p for p in self.state.parameters.values()
        ]
        finite = torch.stack([tensor.isfinite().all() for tensor in local]).all().item()
        if any_process(self.state.strategy.accelerator, not finite):
            message = f"trained weights are not finite after optimizer step {self.state.step}; this epoch is not saved"
            raise NonFiniteError(message, weights_changed=True)

    def _chunks(self, item_ids: np.ndarray, epoch: int, inner: int) -> list[np.ndarray]:
        """Global positions behind each optimizer step: the same for any number of processes.

        The epoch's order is shuffled; the first pass takes it as it is, so that every process has an equal share.
        """
        order = np.arange(len(item_ids))
        if inner > 0:
            order = np.random.default_rng([_ORDER, self.options.seed, epoch, inner]).permutation(
                len(item_ids)
            )
        if self.objective.group_weights is None:
            return np.array_split(order, self.gradient_steps)
        items = list(dict.fromkeys(item_ids[order].tolist()))  # a group's samples stay together
        return [
            order[np.isin(item_ids[order], part)]
            for part in np.array_split(items, self.gradient_steps)
        ]

    def _steps(self, data: Pass, numbers: np.ndarray) -> list[Step]:
        """The training steps of the micro-batch ``numbers``; each inner epoch draws σ and noise again, as in DGPO."""
        rollout, train = data.rollouts.stack(numbers), self.options.train
        values = torch.as_tensor(
            data.advantages[data.rollouts.positions[numbers]], dtype=torch.float32
        )
        clipped = to_device(values, rollout.clean_latents.device).clamp(
            -train.adv_clip_max, train.adv_clip_max
        )
        words = [self.options.seed, data.epoch, *([data.inner] if data.inner else [])]
        rng = np.random.default_rng([_STEPS, *words])
        shared = int(np.random.default_rng([_SHARED, *words]).integers(2**63))
        return [
            Step(rollout, index, clipped, epoch_seed=shared, inner_epoch=data.inner)
            for index in self.objective.steps(train, rollout, rng)
        ]

    def _backward(
        self,
        data: Pass,
        batches: list[np.ndarray],
        kept: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Gradients of all micro-batches, one step of the schedule at a time; ``kept`` is the global number of samples.

        Returns this process's part of the means of loss and metrics (maxima of ``*_max``), 0-dim each.
        """
        sums: dict[str, torch.Tensor] = {}
        weights = self._group_weights(data, batches) if self.objective.group_weights else {}
        for numbers, is_dummy in self.state.strategy.synced_batches(
            batches, np.array([0]), should_stop
        ):
            steps = self._steps(data, numbers)
            for place, step in enumerate(steps):
                if self.objective.group_weights is not None:
                    values = [
                        0.0 if is_dummy else weights[int(number)][place] for number in numbers
                    ]
                    step.group_weights = to_device(
                        torch.tensor(values, dtype=torch.float32), step.advantages.device
                    )
                output, total = (
                    self.objective(step, self.state.policy, self.options.train),
                    len(steps) * kept,
                )
                # A dummy takes part in collective backwards with a loss that has no gradient.
                active = torch.full_like(output.loss, not is_dummy, dtype=torch.bool)
                loss = torch.where(active, output.loss, 0.0).sum() / total
                loss.backward()
                if is_dummy:
                    continue
                sums["loss"] = sums.get("loss", 0.0) + loss.detach().double()
                for name, each in output.metrics.items():
                    each = each.detach()
                    if name.endswith(_MAX):
                        sums[name] = torch.maximum(
                            sums.get(name, each.max().double()), each.max().double()
                        )
                    else:
                        sums[name] = sums.get(name, 0.0) + each.mean().double() * len(each) / total
        return sums

    def _group_weights(self, data: Pass, batches: list[np.ndarray]) -> dict[int, np.ndarray]:
        """Sample → (steps,) weights, from a first pass without gradient over the samples of all processes."""
        rollouts, train, rows = data.rollouts, self.options.train, []
        with torch.no_grad():
            for numbers, is_dummy in self.state.strategy.synced_batches(batches, np.array([0])):
                steps = self._steps(data, numbers)
                values = torch.stack(
                    [self.objective.first_pass(s, self.state.policy, train) for s in steps], dim=1
                )
                if not is_dummy:
                    rows += zip(rollouts.positions[numbers].tolist(), values.tolist(), strict=True)
        rows = sorted(gather_object(rows))
        positions, values = (np.array(column) for column in zip(*rows, strict=True))
        weights = self.objective.group_weights(
            values, rollouts.item_ids[positions], data.advantages[positions], train
        )
        by_position = dict(zip(positions.tolist(), weights, strict=True))
        return {
            int(n): by_position[int(rollouts.positions[n])] for numbers in batches for n in numbers
        }

    def _optimizer_step(self, sums: Mapping[str, torch.Tensor], epoch: int) -> dict[str, float]:
        """Step, unless the gradient is not finite; returns this process's ``sums`` and the norm of the gradient."""
        state, train, strategy = self.state, self.options.train, self.state.strategy
        norm = strategy.finish_gradients(list(state.parameters.values()), train.max_grad_norm)
        # one transfer from the device
        *values, norm = torch.stack(
            [*(value.to(norm.device) for value in sums.values()), norm.double()]
        ).tolist()
        found = dict(zip(sums, values, strict=True))
        if not math.isfinite(norm):  # also after a loss that is not finite
            state.optimizer.zero_grad(set_to_none=True)
            loss = found.get("loss", 0.0)
            what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
            raise NonFiniteError(
                f"{what}, in epoch {epoch + 1} before optimizer step {state.step + 1}; the weights are unchanged. "
                "Lower config.train.learning_rate, or look at the rewards of this epoch."
            )
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        if state.ema:
            state.ema.update(state.step)
        self._follow(every_step=True)
        return found | {"grad_norm": norm / strategy.accelerator.num_processes}
