"""Flow-DPPO (arXiv 2606.11025): PPO with the divergence itself in place of the clip.

Between Gaussians the divergence is known.

| paper (eq. 14, 18) | here                                                 |
|--------------------|------------------------------------------------------|
| D                  | divergence (B,) = mean((μ − μ_old)²)/(2d²)           |
| d                  | trained.std (B,)                                  |
| τ                  | train.dppo_divergence                                |
| β                  | train.beta (KL weight)                               |
"""

import torch
from typing_extensions import override

from paco_grpo.objectives.base import LossOutput, Objective, Step, mean_square, reference_kl
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import Transition, transition
from paco_grpo.types import NoiseStep


class FlowDppo(Objective):
    """−A·ratio, or 0 where D ≥ τ and the ratio has moved in the direction of A, + β·KL.

    The ratio compares Gaussian densities, for Flow-CPS too, although its recorded log-probability
    has no normalizer.

    Metrics: divergence_mean, divergence_max, beyond_share (D ≥ τ), masked_positive and
    masked_negative (masked samples by the sign of A), ratio_mean, ratio_deviation, policy_loss and,
    with β ≠ 0, kl.
    """

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        noise = step.noise
        advantages = step.advantages
        trained = transition(policy, step.rollout, noise.latents, step.index)
        divergence = _divergence(noise, trained).detach()
        distance_to_old = mean_square(noise.next_latents - noise.mean)
        distance_to_new = mean_square(noise.next_latents - trained.mean)
        log_ratio = (distance_to_old - distance_to_new) / (2 * trained.std.square())
        beyond = divergence >= train.dppo_divergence
        masked_positive = beyond & (log_ratio > 0) & (advantages > 0)
        masked_negative = beyond & (log_ratio < 0) & (advantages < 0)
        masked = masked_positive | masked_negative
        # Masked before exp, which may overflow: the gradient would be 0 · ∞.
        ratio = log_ratio.masked_fill(masked, 0.0).exp()
        loss = torch.where(masked, 0.0, -advantages * ratio)
        metrics = {
            "divergence_mean": divergence,
            "divergence_max": divergence,
            "beyond_share": beyond.float(),
            "masked_positive": masked_positive.float(),
            "masked_negative": masked_negative.float(),
            "ratio_mean": log_ratio.detach().exp(),
            "ratio_deviation": log_ratio.detach().expm1().abs(),
            "policy_loss": loss,
        }
        if train.beta != 0:
            metrics["kl"] = reference_kl(step, policy, trained)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)

    @override
    def first_deviation(self, step: Step, policy: Policy) -> torch.Tensor:
        """D (B,) before the first update, where it should be 0, in units of τ/10."""
        trained = transition(policy, step.rollout, step.noise.latents, step.index)
        return _divergence(step.noise, trained) / (self.train.dppo_divergence / 10)


def _divergence(noise: NoiseStep, trained: Transition) -> torch.Tensor:
    return mean_square(trained.mean - noise.mean) / (2 * trained.std.square())
