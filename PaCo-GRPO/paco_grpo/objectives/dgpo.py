"""Direct Group Preference Optimization (arXiv 2510.08425): good images of a group against bad.

| paper                  | here                                                     |
|------------------------|----------------------------------------------------------|
| G⁺, G⁻ with weights    | sign and size of the advantages, ΣA = 0 in a group       |
| β                      | train.dgpo_beta                                          |
| reference of the group | reference weights or ``slow`` (train.dgpo_reference)       |
| ratio, ε               | exp(e_slow − e), train.dgpo_clip_range                   |
| KL weight              | train.beta                                               |

The loss of a group, (1/β)·softplus(s) with s = (β/K)·Σ A_i·(e_i − e_i(ref)), has the gradient mean
of sigmoid(s)·A_i·∇e_i. So ``measure`` and ``prepare`` compute sigmoid(s)·A_i without gradient, and
``loss`` trains sample by sample.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.objectives.awm import slow_decay
from paco_grpo.objectives.base import LossOutput, MicroBatch, Snapshot, Step, mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective
from paco_grpo.options.schema import RunOptions, TrainOptions
from paco_grpo.policies.base import Policy


class _SampleChange(NamedTuple):
    """What the weights of a group need of one sample."""

    position: int
    item_id: int
    advantage: float
    changes: list[float]  # e − e(ref) at each step


class Dgpo(NoisedObjective):
    """sigmoid(s)·A·e + β·mean((v − v_ref)²).

    e has no gradient where the ratio is already beyond ε in A's direction.

    Metrics: policy_loss, matching_error and, with a clip range, masked_share and slow_distance;
    with a KL weight, kl.
    """

    default_sigmas = 4
    whole_groups = True

    def __init__(self, train: TrainOptions) -> None:
        super().__init__(train)
        if train.dgpo_clip_range is not None or train.dgpo_reference == "slow":
            self.snapshots = (Snapshot("slow", slow_decay, samples_from=200, every_step=True),)

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        yield from super().check(options)
        if not options.use_lora:
            yield (
                "use_lora=False cannot be used with train.loss_type='dgpo': "
                "its reference is the model without its adapter"
            )
        if not options.per_prompt_stat_tracking or options.sample.num_images_per_prompt < 2:
            yield (
                "train.loss_type='dgpo' compares images of one prompt: it needs "
                "per_prompt_stat_tracking=True and at least 2 sample.num_images_per_prompt"
            )

    @override
    def measure(self, micro_batches: Sequence[MicroBatch], policy: Policy) -> list[_SampleChange]:
        measured: list[_SampleChange] = []
        for micro_batch in micro_batches:
            steps = micro_batch.build_steps()
            columns = [self.error_change(step, policy).tolist() for step in steps]
            if micro_batch.is_dummy:
                continue
            positions = micro_batch.positions.tolist()
            item_ids = steps[0].rollout.item_ids.tolist()
            advantages = micro_batch.advantages.tolist()
            changes = map(list, zip(*columns, strict=True))
            rows = zip(positions, item_ids, advantages, changes, strict=True)
            measured += [_SampleChange(*row) for row in rows]
        return measured

    @override
    def prepare(
        self, micro_batches: Sequence[MicroBatch], measured: Sequence[_SampleChange]
    ) -> None:
        """Set sigmoid(s)·A of every sample and step, over the groups of all processes."""
        # Sorted, so that sums over a group do not depend on the number of processes.
        samples = sorted(measured)
        _, item_ids, advantages, changes = map(np.array, zip(*samples, strict=True))
        weights = group_weights(changes, item_ids, advantages, self.train.dgpo_beta)
        row_of = {sample.position: row for row, sample in enumerate(samples)}
        for micro_batch in micro_batches:
            if micro_batch.is_dummy:
                continue
            rows = [row_of[position] for position in micro_batch.positions.tolist()]
            micro_batch.group_weights = torch.tensor(weights[rows].T, dtype=torch.float32)

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        weight = step.group_weights
        if weight is None:  # of a dummy, which has no group
            weight = torch.zeros_like(step.advantages)
        noised = Noised(step, policy, shared=True)
        velocity = noised.velocity()
        error = noised.error(velocity)
        metrics = {"matching_error": error}
        trained = error
        if train.dgpo_clip_range is not None:
            slow = noised.velocity("slow")
            ratio = (noised.error(slow) - error.detach()).exp()
            above = ratio > 1 + train.dgpo_clip_range
            below = ratio < 1 - train.dgpo_clip_range
            beyond = torch.where(weight > 0, above, below)
            trained = torch.where(beyond, error.detach(), error)
            metrics["masked_share"] = beyond.float()
            metrics["slow_distance"] = mean_square(velocity - slow)
        loss = weight * trained
        metrics["policy_loss"] = loss
        if train.beta != 0:
            metrics["kl"] = mean_square(velocity - noised.reference)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)

    @torch.no_grad()
    def error_change(self, step: Step, policy: Policy) -> torch.Tensor:
        """e − e(ref) (B,), with one noise for all samples of a group."""
        noised = Noised(step, policy, shared=True)
        slow = self.train.dgpo_reference == "slow"
        reference = noised.velocity("slow") if slow else noised.reference
        return noised.error(noised.velocity()) - noised.error(reference)


def group_weights(
    changes: np.ndarray, item_ids: np.ndarray, advantages: np.ndarray, dgpo_beta: float
) -> np.ndarray:
    """sigmoid(s)·A_i (n, steps), A centered again, since clipping and left-out samples shift it.

    Args:
        changes: e − e(ref), (n, steps).
        item_ids: (n,) samples with equal ids are a group.
        advantages: (n,) clipped.
        dgpo_beta: β.
    """
    weights = np.zeros_like(changes)
    for item_id in np.unique(item_ids):
        group = item_ids == item_id
        centered = (advantages[group] - advantages[group].mean())[:, None]
        total = dgpo_beta * (centered * changes[group]).mean(axis=0)
        weights[group] = centered / 2 * (1 + np.tanh(total / 2))  # sigmoid, without overflow
    return weights
