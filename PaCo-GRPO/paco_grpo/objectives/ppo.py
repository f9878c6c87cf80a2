"""Flow-GRPO's clipped objective (arXiv 2505.05470, eq. 7).

| paper    | here                                            |
|----------|-------------------------------------------------|
| r_t(θ)   | ratio (B,)                                      |
| Â        | step.advantages (B,)                            |
| ε        | train.clip_range                                |
| β        | train.beta (KL weight)                          |
| log p    | of the recorded x', by the trained weights      |
| μ, μ_ref | transition means, trained and reference weights |

The log-ratio is a mean over tokens and channels and not their sum, hence a clip range near 1e-4.
The reference is the base model, or with ``train.reference='start'`` the adapter of ``lora_path``.
"""

import torch
from typing_extensions import override

from paco_grpo.objectives.base import LossOutput, Objective, Step, reference_kl
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import transition


class Ppo(Objective):
    """max(−A·ratio, −A·clip(ratio, 1 ± clip_range)) + β·KL.

    Metrics: ratio_mean, ratio_deviation (|ratio − 1|), clip_share (see ``ratio_metrics``),
    approx_kl, policy_loss and, with β ≠ 0, kl.
    """

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        noise = step.noise  # with the log-probability of the weights before the update
        trained = transition(policy, step.rollout, noise.latents, step.index)
        log_ratio = trained.log_prob(noise.next_latents) - noise.log_prob
        ratio = log_ratio.exp()
        loss = clipped_loss(ratio, step.advantages, train.clip_range)
        metrics = ratio_metrics(ratio, log_ratio, train.clip_range)
        metrics["policy_loss"] = loss
        if train.beta != 0:  # the KL term costs a forward of the reference
            metrics["kl"] = reference_kl(step, policy, trained)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """max(−A·ratio, −A·clip(ratio, 1 ± clip_range)), per sample (B,)."""
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def ratio_metrics(
    ratio: torch.Tensor, log_ratio: torch.Tensor, clip_range: float
) -> dict[str, torch.Tensor]:
    """Per-sample (B,) diagnostics of the probability ratio.

    clip_share counts ratios outside 1 ± ``clip_range``, as is usual. Not all of them lose their
    gradient: one that has moved against its advantage keeps it.
    """
    ratio = ratio.detach()
    deviation = (ratio - 1.0).abs()
    return {
        "ratio_mean": ratio,
        "ratio_deviation": deviation,
        "clip_share": (deviation > clip_range).float(),
        "approx_kl": 0.5 * log_ratio.detach().square(),
    }
