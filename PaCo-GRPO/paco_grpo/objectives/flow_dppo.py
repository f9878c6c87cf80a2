"""Flow-DPPO (arXiv 2606.11025): the clip of PPO replaced by the divergence itself, which is known between Gaussians.

| paper (eq. 14, 18) | here                                                 |
|--------------------|------------------------------------------------------|
| D                  | divergence (B,) = mean((μ − μ_old)²)/(2d²)           |
| d                  | transition.std (B,)                                  |
| τ                  | train.dppo_divergence                                |
| β                  | train.beta (KL weight)                               |
"""

from collections.abc import Iterator

import torch

from paco_grpo.objectives.base import (
    LossOutput,
    Step,
    check_recorded_steps,
    mean_square,
    objective,
    with_kl,
)
from paco_grpo.options.schema import RunOptions, TrainOptions
from paco_grpo.policies.base import Policy


def _check(options: RunOptions) -> Iterator[str]:
    sample, train = options.sample, options.train
    yield from check_recorded_steps(options)
    if sample.cps and sample.num_steps - 1 in (
        sample.noise_steps if train.timesteps is None else train.timesteps
    ):
        yield f"sample.noise_steps: Flow-CPS adds no noise at the last step {sample.num_steps - 1}; leave it out"


def _first_divergence(step: Step, policy: Policy, train: TrainOptions) -> torch.Tensor:
    """D (B,) before the first update, where it should be 0, in units of τ/10."""
    transition = step.transition(policy)
    return _divergence(transition.mean - step.noise.mean, transition.std) / (
        train.dppo_divergence / 10
    )


def _divergence(change: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return mean_square(change) / (2 * std.square())


@objective(check=_check, first_deviation=_first_divergence)
def flow_dppo(step: Step, policy: Policy, train: TrainOptions) -> LossOutput:
    """−A·ratio, or 0 where D ≥ τ and the ratio has moved in the direction of A, + β·KL.

    The ratio compares Gaussian densities, for Flow-CPS too, although its recorded log-probability has no normalizer.

    Metrics: divergence_mean, divergence_max, beyond_share (D ≥ τ), masked_positive and masked_negative (masked samples by
    the sign of A), ratio_mean, ratio_deviation, policy_loss and, with β ≠ 0, kl.
    """
    transition, noise, advantages = step.transition(policy), step.noise, step.advantages
    divergence = _divergence(transition.mean.detach() - noise.mean, transition.std)
    old, new = (
        mean_square(noise.next_latents - noise.mean),
        mean_square(noise.next_latents - transition.mean),
    )
    ratio = ((old - new) / (2 * transition.std.square())).exp()
    beyond = divergence >= train.dppo_divergence
    positive = beyond & (ratio > 1) & (advantages > 0)
    negative = beyond & (ratio < 1) & (advantages < 0)
    loss = torch.where(positive | negative, 0.0, -advantages * ratio)
    metrics = {
        "divergence_mean": divergence,
        "divergence_max": divergence,
        "beyond_share": beyond.float(),
        "masked_positive": positive.float(),
        "masked_negative": negative.float(),
        "ratio_mean": ratio,
        "ratio_deviation": (ratio.detach() - 1).abs(),
        "policy_loss": loss,
    }
    return with_kl(loss, metrics, train.beta, lambda: step.reference_kl(policy, transition))
