"""Direct Group Preference Optimization (arXiv 2510.08425): good images of a group against bad.

| paper                  | here                                                     |
|------------------------|----------------------------------------------------------|
| G⁺, G⁻ with weights    | sign and size of the advantages, ΣA = 0 in a group       |
| β                      | train.dgpo_beta                                          |
| reference of the group | reference weights or ``slow`` (train.dgpo_reference)       |
| ratio, ε               | exp(e_slow − e), train.dgpo_clip_range                   |
| KL weight              | train.beta                                               |

The loss of a group, (1/β)·softplus(s) with s = (β/K)·Σ A_i·(e_i − e_i(ref)), has the gradient mean
of sigmoid(s)·A_i·∇e_i. So ``measure`` and ``per_group`` compute sigmoid(s)·A_i without gradient,
and ``loss`` trains sample by sample.
"""

from collections.abc import Iterator

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.objectives.awm import slow_decay
from paco_grpo.objectives.base import Group, LossOutput, Snapshot, Step, mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective, check_groups
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies.base import Policy


class Dgpo(NoisedObjective):
    """sigmoid(s)·A·e + β·mean((v − v_ref)²).

    e has no gradient where the ratio is already beyond ε in A's direction.

    Metrics: policy_loss, matching_error and, with a clip range, masked_share and slow_distance;
    with a KL weight, kl.
    """

    default_sigmas = 4
    whole_groups = True

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        train = options.train
        if train.dgpo_clip_range is not None or train.dgpo_reference == "slow":
            self.snapshots = (Snapshot("slow", slow_decay, samples_from=200, every_step=True),)

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        yield from super().check(options)
        yield from check_groups(options)

    @override
    def measure(self, step: Step, policy: Policy) -> dict[str, torch.Tensor]:
        """e − e(ref), with one noise for all samples of a group."""
        noised = Noised(step, policy, shared=True)
        slow = self.train.dgpo_reference == "slow"
        reference = noised.velocity("slow") if slow else noised.reference
        return {"change": noised.error(noised.velocity()) - noised.error(reference)}

    @override
    def per_group(self, group: Group) -> dict[str, np.ndarray]:
        """sigmoid(s)·A, A centered again, since clipping and left-out samples shift it."""
        centered = (group.advantages - group.advantages.mean())[:, None]
        total = self.train.dgpo_beta * (centered * group.measured["change"]).mean(axis=0)
        return {"weight": centered / 2 * (1 + np.tanh(total / 2))}  # sigmoid, without overflow

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        weight = step.group["weight"]
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
