"""Flow-GRPO's clipped objective (arXiv 2505.05470, eq. 7).

| paper             | here                                |
|-------------------|-------------------------------------|
| r_t(θ)            | ratio (B,)                          |
| Â                 | advantages (B,)                     |
| ε                 | config.train.clip_range             |
| β                 | config.train.beta (KL weight)       |
| μ, μ_ref          | transition.mean, adapters-off mean  |
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
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.rollout import record_transition
from paco_grpo.types import RolloutRecord


def ppo_loss(record: RolloutRecord, policy: Policy, config: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over samples of weight · mean over steps of max(−A·ratio, −A·clip(ratio, 1 ± clip_range)) + β·KL.

    The reference forward happens only if β is not 0.

    Args:
        record: Micro-batch with advantages (B,) and weights (B,).
        policy: Evaluated with gradient at each recorded step.
        config: ``config.train.{clip_range, adv_clip_max, beta}``.

    Returns:
        Loss sum (0-dim float32) and metrics: ratio_mean, ratio_deviation (mean |ratio − 1|), clip_share, approx_kl,
        policy_loss and, with β ≠ 0, kl.
    """
    check_has_steps(record)
    train = config.train
    advantages, weights = clipped_advantages(record, train.adv_clip_max)

    def term(position: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        transition = record_transition(policy, record, position)
        log_ratio = transition.log_prob(record.next_latents[:, position]) - record.log_prob[:, position]
        ratio = log_ratio.exp()
        loss = clipped_loss(ratio, advantages, train.clip_range)
        values = ratio_metrics(ratio, log_ratio, train.clip_range) | {"policy_loss": loss}
        if train.beta != 0:
            kl = reference_kl(policy, record, position, transition)
            loss = loss + train.beta * kl
            values["kl"] = kl
        return loss, values

    return mean_over_steps(range(len(record.step_index)), term, weights)


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """max(−A·ratio, −A·clip(ratio, 1 ± clip_range)), per sample (B,)."""
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def ratio_metrics(ratio: torch.Tensor, log_ratio: torch.Tensor, clip_range: float) -> dict[str, torch.Tensor]:
    """Per-sample (B,) diagnostics of the probability ratio."""
    deviation = (ratio.detach() - 1.0).abs()
    return {
        "ratio_mean": ratio,
        "ratio_deviation": deviation,
        "clip_share": (deviation > clip_range).float(),
        "approx_kl": 0.5 * log_ratio.detach().square(),
    }
