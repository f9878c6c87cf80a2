"""GRPO-Guard (arXiv 2510.22319): a ratio normalised per step, so that clipping acts alike at every noise level.

| paper             | here                                                    |
|-------------------|---------------------------------------------------------|
| d = sqrt(−dt)·s   | transition.std (B,)                                     |
| b                 | bias (B,) = mean((μ − μ_old)²)/(2d²)                    |
| ratio             | exp((log p − log p_old + b)·d)                          |
"""

from __future__ import annotations

from typing import Any

import torch

from paco_grpo.objectives.common import (
    check_has_steps,
    clipped_advantages,
    mean_over_steps,
    reference_kl,
)
from paco_grpo.objectives.ppo import clipped_loss, ratio_metrics
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.rollout import record_transition
from paco_grpo.types import RolloutRecord


def guard_loss(record: RolloutRecord, policy: Policy, config: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over samples of weight · mean over steps of clipped policy loss/(−dt) + β·KL, with the guarded ratio.

    Everything is per sample (the published code averages b, s and dt over the batch). μ_old is ``record.step_mean``.
    Arguments, returns and metrics as :func:`paco_grpo.objectives.ppo.ppo_loss`, plus the metric ``guard_bias``.

    Raises:
        ValueError: A Flow-CPS record, whose log-probability has no normaliser for the guard to undo.
    """
    check_has_steps(record)
    if record.cps:
        raise ValueError("loss_type 'guard_grpo' needs Flow-SDE log-probabilities: set sample.cps = False")
    train = config.train
    advantages, weights = clipped_advantages(record, train.adv_clip_max)

    def term(position: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        step = int(record.step_index[position])
        minus_dt = float(record.sigmas[step] - record.sigmas[step + 1])
        transition = record_transition(policy, record, position)
        log_ratio = transition.log_prob(record.next_latents[:, position]) - record.log_prob[:, position]
        distance = (transition.mean - record.step_mean[:, position]).square().flatten(1).mean(1)
        bias = distance / (2 * transition.std.square())
        guarded = (log_ratio + bias) * transition.std
        ratio = guarded.exp()
        loss = clipped_loss(ratio, advantages, train.clip_range) / minus_dt
        values = ratio_metrics(ratio, guarded, train.clip_range) | {"policy_loss": loss, "guard_bias": bias}
        if train.beta != 0:
            kl = reference_kl(policy, record, position, transition)
            loss = loss + train.beta * kl
            values["kl"] = kl
        return loss, values

    return mean_over_steps(range(len(record.step_index)), term, weights)
