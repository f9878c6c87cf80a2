"""The training half of an epoch: the objective on micro-batches, then the optimizer steps.

The samples of an epoch are divided into chunks, one for each optimizer step, and a chunk into
micro-batches, which share a forward. A micro-batch is trained on several steps of the schedule,
each with its own loss and backward.

From the old log-probabilities to the optimizer step: ``sampling.denoise.rollout`` records them, and
``recompute_old_log_probs`` replaces them where they would be too far off, as usual in bf16; then
``update``, the ``loss`` of the objective (ratio, clip, KL), ``_optimizer_step``.

The objective may leave images out (``keep``) and compare those of a group (``objectives.groups``).
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from paco_grpo.distributed import any_process
from paco_grpo.objectives import MicroBatch, Objective, Step
from paco_grpo.objectives.groups import measure_samples, set_group_values
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import lora
from paco_grpo.sampling.denoise import with_current_log_probs
from paco_grpo.training.sample import Rollouts
from paco_grpo.training.state import TrainState
from paco_grpo.types import Stream

logger = logging.getLogger(__name__)

_MAX = "_max"  # metrics with this suffix are reduced by max instead of mean
_DUMMY = np.array([0])  # this process's first sample, whose result is dropped


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite before the optimizer step, or a weight after it.

    ``weights_changed`` tells which.
    """

    def __init__(self, message: str, weights_changed: bool = False) -> None:
        super().__init__(message)
        self.weights_changed = weights_changed


class Meter:
    """Metrics of one optimizer step on this process, as 0-dim float64 tensors on the device.

    Weights add up to 1 over all processes. The sum of a metric's totals over the processes is
    therefore its mean over all samples and steps.
    """

    def __init__(self) -> None:
        self.totals: dict[str, torch.Tensor] = {}

    def add(self, metrics: Mapping[str, torch.Tensor], weight: float) -> None:
        """Add per-sample values (B,), each counting with ``weight``."""
        for name, values in metrics.items():
            values = values.detach().double()
            if name.endswith(_MAX):
                largest = values.max()
                self.totals[name] = torch.maximum(self.totals.get(name, largest), largest)
            else:
                self.totals[name] = self.totals.get(name, 0.0) + values.sum() * weight


@dataclass
class Updater:
    """One process's part in the optimizer steps of an epoch."""

    state: TrainState  # its parameters, optimizer and counters change
    objective: Objective
    options: RunOptions
    gradient_steps: int  # optimizer steps per pass over the samples

    def recompute_old_log_probs(
        self, rollouts: Rollouts, positions: np.ndarray | None = None
    ) -> None:
        """Replace recorded means and log-probabilities by those of the weights before the update.

        Always with ``train.old_log_prob='recompute'``, and with 'auto' where low precision or
        compiled blocks make the first ratio not 1. Done in place, for the samples at ``positions``
        (None: all).
        """
        if not self._must_recompute(rollouts):
            return
        if positions is None:
            positions = rollouts.positions
        with self.state.strategy.same_outcome():
            for numbers, is_dummy in self._synced_batches(rollouts, positions):
                recomputed = with_current_log_probs(
                    self.state.policy, rollouts.stack(numbers), self.options.speed.compile
                )
                if is_dummy:
                    continue
                for number, sample in zip(numbers, recomputed.split(), strict=True):
                    recorded = rollouts.samples[number]
                    rollouts.samples[number] = dataclasses.replace(
                        recorded, noise_steps=sample.noise_steps
                    )

    def update(
        self,
        rollouts: Rollouts,
        advantages: np.ndarray,
        kept: np.ndarray,
        epoch: int,
        should_stop: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Train on one epoch's samples; returns metrics over the epoch, equal on every process.

        Args:
            rollouts: What this process sampled. For an objective that keeps all images, after
                ``recompute_old_log_probs``.
            advantages: (N,) over all processes, by position.
            kept: (N,) bool; the others have no advantage.
            epoch: For random streams.
            should_stop: Asked before each micro-batch of the first optimizer step.
        """
        train = self.options.train
        policy = self.state.policy
        strategy = self.state.strategy
        chosen = self._chosen(rollouts.item_ids, advantages, kept)
        trained = kept & chosen
        if not self.objective.keeps_all:
            self.recompute_old_log_probs(rollouts, np.flatnonzero(trained))
        advantages = advantages.clip(-train.adv_clip_max, train.adv_clip_max)
        records: list[dict[str, float]] = []  # of each optimizer step
        for inner_epoch in range(train.num_inner_epochs):
            for chunk in self._chunks(rollouts.item_ids, chosen, epoch, inner_epoch):
                kept_positions = chunk[trained[chunk]]
                if len(kept_positions) == 0:
                    continue
                # Each sample counts 1 / (kept samples of the chunk, over all processes).
                micro_batches = self._micro_batches(
                    rollouts, advantages, kept_positions, epoch, inner_epoch
                )
                if self.objective.whole_groups:
                    with strategy.same_outcome():
                        samples = measure_samples(self.objective, micro_batches, policy)
                    set_group_values(self.objective, micro_batches, gather_object(samples))
                meter = Meter()
                # A run can stop before its first optimizer step; later the epoch is finished.
                may_stop = None if records else should_stop
                # Gradients add up over the micro-batches, and over the steps of the schedule.
                # With one process, same_outcome does nothing, and only may_stop ends the loop early.
                with strategy.same_outcome():
                    for micro_batch in strategy.unless_stopped(micro_batches, may_stop):
                        for step in micro_batch.build_steps():
                            loss, metrics = self.objective.loss(step, policy)
                            (loss * step.weight).sum().backward()
                            if not micro_batch.is_dummy:
                                meter.add({"loss": loss, **metrics}, step.weight)
                records.append(self._optimizer_step(meter, epoch))
        self._check_weights()
        self._blend_snapshots(every_step=False)
        metrics = _epoch_metrics(records)
        if not self.objective.keeps_all and kept.any():
            metrics["kept_share"] = trained.sum() / kept.sum()
        return metrics

    def _optimizer_step(self, meter: Meter, epoch: int) -> dict[str, float]:
        """Step, unless the gradient is not finite.

        Returns:
            This process's part of the metrics, and the norm of the gradient.
        """
        state = self.state
        strategy = state.strategy
        parameters = list(state.parameters.values())
        norm = strategy.finish_gradients(parameters, self.options.train.max_grad_norm).double()
        totals = [total.to(norm.device) for total in meter.totals.values()]
        values = torch.stack([*totals, norm]).tolist()  # one transfer from the device
        norm = values.pop()
        metrics = dict(zip(meter.totals, values, strict=True))
        if not math.isfinite(norm):  # also after a loss that is not finite
            state.optimizer.zero_grad(set_to_none=True)
            loss = metrics.get("loss", 0.0)
            what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
            raise NonFiniteError(
                f"{what}, in epoch {epoch + 1} before optimizer step "
                f"{state.optimizer_steps + 1}; the weights are unchanged. Lower "
                "config.train.learning_rate, or look at the rewards of this epoch."
            )
        state.between_epochs = False
        with strategy.same_outcome():  # the first step allocates the optimizer's moments
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
            state.optimizer_steps += 1
            if state.ema:
                state.ema.update(state.optimizer_steps)
            self._blend_snapshots(every_step=True)
        # ``_epoch_metrics`` adds the processes' parts, and the norm is the same on each of them.
        return metrics | {"grad_norm": norm / strategy.accelerator.num_processes}

    def _must_recompute(self, rollouts: Rollouts) -> bool:
        """What ``train.old_log_prob`` says; 'auto' is decided once, before the first update."""
        state = self.state
        mode = self.options.train.old_log_prob
        if not self.objective.needs_noise_steps or mode == "rollout":
            return False
        if mode == "recompute":
            state.must_recompute = True
        elif state.must_recompute is None:
            with state.strategy.same_outcome():
                deviation = self._first_deviation(rollouts)
            too_large = not deviation <= 1  # also NaN
            state.must_recompute = any_process(state.strategy.accelerator, too_large)
            if too_large:
                logger.warning(
                    "old log-probabilities are recomputed before each update "
                    "(config.train.old_log_prob): the first samples' are off by %.1e times the "
                    "limit",
                    deviation,
                )
        return state.must_recompute

    def _synced_batches(
        self, rollouts: Rollouts, positions: np.ndarray
    ) -> Iterator[tuple[np.ndarray, bool]]:
        """This process's samples among those at ``positions``: (their numbers, is_dummy).

        Where a forward is a collective operation, dummies make the number of micro-batches the same
        on every process.
        """
        batches = rollouts.batches_at(positions, self.options.train.batch_size)
        return self.state.strategy.synced_batches(batches, _DUMMY)

    def _first_deviation(self, rollouts: Rollouts) -> float:
        """How far log-probabilities of a first micro-batch deviate, in units of the limit.

        Of finite samples, if this process has any.
        """
        policy = self.state.policy
        compiled = self.options.speed.compile
        if policy.dtype == torch.float32 and not compiled:
            return 0.0
        finite = rollouts.positions[rollouts.finite]
        measured = finite if len(finite) else rollouts.positions
        numbers = rollouts.batches_at(measured, self.options.train.batch_size)[0]
        rollout = rollouts.stack(numbers)
        deviations = []
        for index in self._trained_indices(rollouts, epoch=0, inner_epoch=0):
            step = Step(rollout, index, torch.zeros(len(numbers), device=policy.device))
            with torch.set_grad_enabled(compiled):  # as in ``with_current_log_probs``
                deviations.append(self.objective.first_deviation(step, policy).detach())
        return torch.stack(deviations, dim=1).mean().item()

    def _chosen(self, item_ids: np.ndarray, advantages: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """(N,) bool, False where the objective leaves a sample out.

        It chooses among the ``kept`` samples, which have an advantage. The others are True, so an
        objective that leaves none out has the chunks that it would have if all had one.
        """
        members = np.flatnonzero(kept)
        mask = np.asarray(self.objective.keep(advantages[members], item_ids[members]))
        if mask.shape != members.shape or mask.dtype != bool:
            raise ConfigError(
                f"config.train.loss_type={self.options.train.loss_type!r}: keep must return a mask "
                f"of {len(members)} booleans, got the shape {mask.shape} and the type {mask.dtype}"
            )
        chosen = np.ones(len(kept), bool)
        chosen[members] = mask
        return chosen

    def _chunks(
        self, item_ids: np.ndarray, chosen: np.ndarray, epoch: int, inner_epoch: int
    ) -> list[np.ndarray]:
        """Positions of the chosen samples of each optimizer step, in order.

        They do not depend on the number of processes. The sampler has shuffled the epoch. The first
        pass takes its order, so that processes have equal shares of a chunk if all are chosen.
        """
        order = np.arange(len(item_ids))
        if inner_epoch > 0:
            words = [Stream.PASS_ORDER, self.options.seed, epoch, inner_epoch]
            order = np.random.default_rng(words).permutation(len(item_ids))
        order = order[chosen[order]]
        if not self.objective.whole_groups:
            return np.array_split(order, self.gradient_steps)
        items = list(dict.fromkeys(item_ids[order].tolist()))
        parts = np.array_split(items, self.gradient_steps)
        return [order[np.isin(item_ids[order], part)] for part in parts]

    def _micro_batches(
        self,
        rollouts: Rollouts,
        advantages: np.ndarray,
        kept_positions: np.ndarray,
        epoch: int,
        inner_epoch: int,
    ) -> list[MicroBatch]:
        """This process's samples among those of a chunk, which are at ``kept_positions``.

        Each inner epoch draws σ and noise again, as in DGPO.
        """
        words = [Stream.SHARED_NOISE, self.options.seed, epoch, inner_epoch]
        epoch_seed = int(np.random.default_rng(words).integers(2**63))
        indices = self._trained_indices(rollouts, epoch, inner_epoch)
        micro_batches = []
        for numbers, is_dummy in self._synced_batches(rollouts, kept_positions):
            positions = rollouts.positions[numbers]
            micro_batch = MicroBatch(
                samples=[rollouts.samples[number] for number in numbers],
                positions=positions,
                advantages=advantages[positions],
                indices=indices,
                weight=0.0 if is_dummy else 1 / len(kept_positions),
                epoch_seed=epoch_seed,
                inner_epoch=inner_epoch,
                is_dummy=is_dummy,
                datasets=rollouts.datasets[positions],
            )
            micro_batches.append(micro_batch)
        return micro_batches

    def _trained_indices(self, rollouts: Rollouts, epoch: int, inner_epoch: int) -> Sequence[int]:
        """Steps of the schedule to train on, the same for all samples of a pass."""
        words = [Stream.TRAINED_STEPS, self.options.seed, epoch, inner_epoch]
        steps = self.objective.steps(rollouts.samples[0], np.random.default_rng(words))
        if len(steps) == 0:
            raise ConfigError(
                f"config.train.loss_type={self.options.train.loss_type!r}: steps chooses no step "
                f"of epoch {epoch + 1}"
            )
        return steps

    def _blend_snapshots(self, every_step: bool) -> None:
        """Move the snapshots of each step, or of each epoch, toward the trained weights."""
        for snapshot in self.objective.snapshots:
            if snapshot.every_step == every_step:
                decay = snapshot.decay(self.state.optimizer_steps)
                lora.blend_snapshot(self.state.policy, snapshot.name, decay)

    def _check_weights(self) -> None:
        """Raise unless all weights are finite: moments can spoil them despite a finite gradient."""
        flags = []
        for parameter in self.state.parameters.values():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            flags.append(local.isfinite().all())
        finite = torch.stack(flags).all().item()
        if any_process(self.state.strategy.accelerator, not finite):
            raise NonFiniteError(
                f"trained weights are not finite after optimizer step "
                f"{self.state.optimizer_steps}; this epoch is not saved",
                weights_changed=True,
            )


def _epoch_metrics(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of an epoch from the records of its optimizer steps on every process."""
    values: dict[str, list[float]] = {}
    for record in gather_object(list(records)):
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    metrics = {}
    for name, parts in values.items():
        # Each process has its part of a mean, so the parts of all processes are added.
        metrics[name] = max(parts) if name.endswith(_MAX) else sum(parts) / len(records)
    return metrics
