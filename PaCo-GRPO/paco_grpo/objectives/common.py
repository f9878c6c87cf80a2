"""What the objectives share: the weights of a micro-batch, and the KL term to the reference policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from paco_grpo.policies.base import Policy
from paco_grpo.sampling.rollout import record_transition
from paco_grpo.sampling.sde import Transition
from paco_grpo.types import RolloutRecord


def clipped_advantages(record: RolloutRecord, adv_clip_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (B,) clipped to ±``adv_clip_max``, and weights (B,); a left-out sample's advantage becomes 0.

    Raises:
        ValueError: The record has no advantages.
    """
    if record.advantages is None:
        raise ValueError("the record has no advantages: fill in record.advantages before asking for a loss")
    weights = torch.ones_like(record.advantages) if record.weights is None else record.weights
    # where, not a product: a left-out sample's advantage may be NaN.
    advantages = torch.where(weights > 0, record.advantages, 0.0)
    return advantages.clamp(-adv_clip_max, adv_clip_max), weights


def check_has_steps(record: RolloutRecord) -> None:
    """
    Raises:
        ValueError: No noise step was recorded.
    """
    if len(record.step_index) == 0:
        raise ValueError(
            "the rollout has no noise step, so there is nothing to train on: "
            "set sample.noise_steps to at least one step and sample.noise_level above 0"
        )


def reference_kl(policy: Policy, record: RolloutRecord, position: int, transition: Transition) -> torch.Tensor:
    """KL (B,) to the reference policy at one recorded step: mean((μ − μ_ref)²)/(2s² + 1e-7) (Flow-GRPO, eq. 13)."""
    with torch.no_grad(), policy.reference():
        reference = record_transition(policy, record, position)
    difference = (transition.mean - reference.mean).square().flatten(1).mean(1)
    return difference / (2 * transition.s.square() + 1e-7)


def mean_over_steps(
    steps: Iterable[int],
    term: Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    weights: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What an objective returns: the sum over samples of weight · mean over ``steps`` of its loss, and its metrics.

    Args:
        steps: At least one.
        term: Step → loss and diagnostics, per sample (B,).
        weights: (B,), 0 = left out.

    Returns:
        Loss sum (0-dim) and each diagnostic's weighted mean over samples and steps (0-dim, no gradient).
    """
    steps = list(steps)
    per_sample = torch.zeros_like(weights)
    metrics: dict[str, torch.Tensor] = {}
    for step in steps:
        loss, values = term(step)
        per_sample = per_sample + loss / len(steps)
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0.0) + weighted_mean(value, weights) / len(steps)
    return weighted_sum(per_sample, weights), metrics


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean (0-dim, no gradient) of per-sample ``values`` (B,); 0 where no sample has weight."""
    kept = torch.where(weights > 0, values.detach(), 0.0)
    return (kept * weights).sum() / weights.sum().clamp_min(1e-12)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum (0-dim) of per-sample ``values`` (B,); a sample of weight 0 gives neither value nor gradient."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()
