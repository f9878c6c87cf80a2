"""Advantage Weighted Matching (arXiv 2509.25050): the matching error on clean targets as negative log-likelihood.

| paper             | here                                            |
|-------------------|-------------------------------------------------|
| log p(x_0), per σ | −``matching_weight``(e, σ), e = mean((v − u)²)   |
| ratio             | exp(log p − log p_old) (B,)                     |
| v_old             | adapter ``old``, only with several updates an epoch |
| v_ema             | adapter ``slow``, weight train.awm_slow_beta    |
| KL weight         | train.beta                                      |
"""

from functools import partial

import torch

from paco_grpo.objectives.base import LossOutput, Snapshot, Step, mean_square, objective, with_kl
from paco_grpo.objectives.forward import Noised, check_forward_steps, forward_steps
from paco_grpo.objectives.ppo import clipped_loss
from paco_grpo.options.schema import TrainOptions
from paco_grpo.policies.base import Policy

_STEPS, _SIGMAS = 1, 6  # defaults: optimizer steps and σ an epoch
_POWER, _TINY = 0.25, 1e-10  # of the generalized Huber weighting


def on_policy(train: TrainOptions) -> bool:
    """Whether an epoch has one optimizer step, so that log p_old is log p itself and needs no forward."""
    return (train.gradient_step_per_epoch or _STEPS) * train.num_inner_epochs == 1


def slow_decay(step: int, train: TrainOptions) -> float:
    """Decay of a slow copy after ``step`` optimizer steps: min(0.3, 0.001·step)."""
    return min(0.3, 0.001 * step)


def matching_weight(error: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """G(e, σ) (B,) float64, about 4σe^¼: the authors' default, ghuber."""
    return sigma.double() * ((error.double() + _TINY) ** _POWER - _TINY**_POWER) / _POWER


@objective(
    needs_noise_steps=False,
    steps=forward_steps(default=_SIGMAS),
    snapshots=(
        Snapshot("old", lambda step, train: 0.0, needed=lambda train: not on_policy(train)),
        Snapshot("slow", slow_decay, needed=lambda train: train.awm_slow_beta > 0),
    ),
    gradient_steps=_STEPS,
    check=partial(check_forward_steps, default=_SIGMAS),
)
def awm(step: Step, policy: Policy, train: TrainOptions) -> LossOutput:
    """max(−A'·ratio, −A'·clip(ratio, 1 ± ε)) + β·mean((v − v_ref)²) + β_slow·mean((v − v_slow)²), A' = A/adv_clip_max.

    Metrics: policy_loss, matching_error, ratio_mean, ratio_deviation, clip_share and, with their weights, slow_distance
    and kl.
    """
    noised = Noised(step, policy)
    velocity = noised.velocity()
    error = noised.error(velocity)

    def log_prob(error: torch.Tensor) -> torch.Tensor:
        return -matching_weight(error, step.sigma)

    current = log_prob(error)
    old = current.detach() if on_policy(train) else log_prob(noised.error(noised.velocity("old")))
    ratio = (current - old).exp()
    loss = clipped_loss(ratio, step.advantages / train.adv_clip_max, train.awm_clip_range)
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
    return with_kl(loss, metrics, train.beta, lambda: mean_square(velocity - noised.reference))
