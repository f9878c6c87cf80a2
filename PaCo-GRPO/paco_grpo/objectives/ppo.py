"""Flow-GRPO's clipped objective (arXiv 2505.05470, eq. 7).

| paper    | here                                      |
|----------|-------------------------------------------|
| r_t(θ)   | ratio (B,)                                |
| Â        | step.advantages (B,)                      |
| ε        | train.clip_range                          |
| β        | train.beta (KL weight)                    |
| μ, μ_ref | mean of the transition, with adapters off |
"""

import torch

from paco_grpo.objectives.base import LossOutput, Objective, Step
from paco_grpo.policies.base import Policy


class Ppo(Objective):
    """max(−A·ratio, −A·clip(ratio, 1 ± clip_range)) + β·KL.

    Metrics: ratio_mean, ratio_deviation (|ratio − 1|), clip_share, approx_kl, policy_loss and, with
    β ≠ 0, kl.
    """

    def loss(self, step: Step, policy: Policy) -> LossOutput:
        """As in the class."""
        train = self.train
        transition = step.transition(policy)
        log_ratio = transition.log_prob(step.noise.next_latents) - step.noise.log_prob
        ratio = log_ratio.exp()
        loss = clipped_loss(ratio, step.advantages, train.clip_range)
        metrics = ratio_metrics(ratio, log_ratio, train.clip_range)
        metrics["policy_loss"] = loss
        if train.beta != 0:  # the KL term costs a forward of the reference
            metrics["kl"] = step.reference_kl(policy, transition)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """max(−A·ratio, −A·clip(ratio, 1 ± clip_range)), per sample (B,)."""
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def ratio_metrics(
    ratio: torch.Tensor, log_ratio: torch.Tensor, clip_range: float
) -> dict[str, torch.Tensor]:
    """Per-sample (B,) diagnostics of the probability ratio."""
    deviation = (ratio.detach() - 1.0).abs()
    return {
        "ratio_mean": ratio,
        "ratio_deviation": deviation,
        "clip_share": (deviation > clip_range).float(),
        "approx_kl": 0.5 * log_ratio.detach().square(),
    }
