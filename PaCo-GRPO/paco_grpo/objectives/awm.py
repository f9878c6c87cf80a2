"""Advantage Weighted Matching (arXiv 2509.25050): the matching error as −log-likelihood.

| paper             | here                                            |
|-------------------|-------------------------------------------------|
| log p(x_0), per σ | −``matching_weight``(e, σ), e = mean((v − u)²)   |
| ratio             | exp(log p − log p_old) (B,)                     |
| v_old             | adapter ``old``, only with several updates an epoch |
| v_ema             | adapter ``slow``, weight train.awm_slow_beta    |
| KL weight         | train.beta                                      |
"""

import torch
from typing_extensions import override

from paco_grpo.objectives.base import LossOutput, Snapshot, Step, mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective
from paco_grpo.objectives.ppo import clipped_loss
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies.base import Policy

# Of the generalized Huber weighting.
_POWER = 0.25
_TINY = 1e-10


class Awm(NoisedObjective):
    """max(−A'·ratio, −A'·clip(ratio, 1 ± ε)) + β·mean((v − v_ref)²) + β_slow·mean((v − v_slow)²).

    A' is A/adv_clip_max.

    Metrics: policy_loss, matching_error, ratio_mean, ratio_deviation, clip_share and, with their
    weights, slow_distance and kl.
    """

    default_sigmas = 6

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        train = options.train
        updates = (train.gradient_step_per_epoch or self.gradient_steps) * train.num_inner_epochs
        self.on_policy = updates == 1  # then log p_old is log p itself and needs no forward
        if not self.on_policy:
            self.snapshots += (Snapshot("old", decay=lambda step: 0.0),)
        if train.awm_slow_beta > 0:
            self.snapshots += (Snapshot("slow", slow_decay),)

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        noised = Noised(step, policy)
        velocity = noised.velocity()
        error = noised.error(velocity)
        log_prob = -matching_weight(error, step.sigma)
        old_log_prob = log_prob.detach()
        if not self.on_policy:
            old_log_prob = -matching_weight(noised.error(noised.velocity("old")), step.sigma)
        ratio = (log_prob - old_log_prob).exp()
        advantages = step.advantages / train.adv_clip_max
        loss = clipped_loss(ratio, advantages, train.awm_clip_range)
        deviation = (ratio.detach() - 1).abs()
        metrics = {
            "policy_loss": loss,
            "matching_error": error,
            "ratio_mean": ratio,
            "ratio_deviation": deviation,
            "clip_share": (deviation > train.awm_clip_range).float(),
        }
        if train.awm_slow_beta != 0:
            metrics["slow_distance"] = mean_square(velocity - noised.velocity("slow"))
            loss = loss + train.awm_slow_beta * metrics["slow_distance"]
        if train.beta != 0:
            metrics["kl"] = mean_square(velocity - noised.reference)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)


def slow_decay(step: int) -> float:
    """Decay of a slow copy after ``step`` optimizer steps: min(0.3, 0.001·step)."""
    return min(0.3, 0.001 * step)


def matching_weight(error: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """G(e, σ) (B,) float64, about 4σe^¼: the authors' default, ghuber."""
    return sigma.double() * ((error.double() + _TINY) ** _POWER - _TINY**_POWER) / _POWER
