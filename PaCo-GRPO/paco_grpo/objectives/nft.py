"""DiffusionNFT (arXiv 2509.16117): learn on the forward process, from positive and negative implicit policies.

| paper            | here                                             |
|------------------|--------------------------------------------------|
| v_θ, v_old       | velocity, old velocity (adapter ``old``)         |
| β                | config.train.nft_beta (mixing coefficient)       |
| r ∈ [0, 1]       | preference (B,)                                  |
| x_t              | (1 − t)·x_0 + t·ε at the trained steps' σ        |
| KL weight        | config.train.beta                                |
"""

from __future__ import annotations

from typing import Any

import torch

from paco_grpo.objectives.common import clipped_advantages, mean_over_steps
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.rollout import step_noise
from paco_grpo.types import RolloutRecord

# Kept apart from the steps' own noise: (seed, step + this) seeds the fresh noise.
_FRESH = 1 << 20


def nft_loss(record: RolloutRecord, policy: Policy, config: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over samples of weight · mean over steps of the NFT loss + KL weight · mean((v − v_ref)²).

    v is the conditional velocity: with true CFG, guidance is part of sampling and not of what is learned.

    The fresh noise of a sample comes from its own seed and the step, so its loss does not depend on its batch and a
    resumed run draws the same. The reference forward happens only if the KL weight is not 0.

    Args:
        record: Micro-batch with advantages, weights and seeds (B,). Noise steps need not have been recorded.
        policy: With the adapter ``old`` (see ``adapters.add_old_adapter``).
        config: ``config.train.{adv_clip_max, nft_beta, beta, timesteps}``; ``timesteps`` None = the recorded steps.

    Returns:
        Loss sum (0-dim float32) and metrics: policy_loss, preference_mean, old_distance (mean (v − v_old)²) and, with
        a KL weight, kl.

    Raises:
        ValueError: No seeds, or no step to train on.
    """
    train = config.train
    steps = list(record.step_index.tolist() if train.timesteps is None else train.timesteps)
    if record.seeds is None or not steps:
        raise ValueError("nft needs record.seeds and at least one trained step: set train.timesteps or noise_steps")
    advantages, weights = clipped_advantages(record, train.adv_clip_max)
    preference = (advantages / train.adv_clip_max / 2 + 0.5).clamp(0, 1)

    def term(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        clean = record.clean_latents
        t = record.sigmas[step].to(clean.device).expand(len(record))
        noise = step_noise(record.seeds.tolist(), _FRESH + step, clean)
        noisy = (1 - t.view(-1, 1, 1)) * clean + t.view(-1, 1, 1) * noise
        arguments = (noisy, t, record.conditioning, record.height, record.width)
        with torch.no_grad(), policy.old():
            old = policy.conditional_velocity(*arguments)
        velocity = policy.conditional_velocity(*arguments)
        loss = nft_terms(clean, noisy, t, velocity, old, preference, train.nft_beta) * train.adv_clip_max
        values = {"policy_loss": loss, "preference_mean": preference, "old_distance": _mean_square(velocity - old)}
        if train.beta != 0:
            with torch.no_grad(), policy.reference():
                reference = policy.conditional_velocity(*arguments)
            kl = _mean_square(velocity - reference)
            loss = loss + train.beta * kl
            values["kl"] = kl
        return loss, values

    return mean_over_steps(steps, term, weights)


def nft_terms(
    clean: torch.Tensor,
    noisy: torch.Tensor,
    t: torch.Tensor,
    velocity: torch.Tensor,
    old: torch.Tensor,
    preference: torch.Tensor,
    nft_beta: float,
) -> torch.Tensor:
    """(r·mean((x̂0⁺ − x_0)²)/w⁺ + (1 − r)·mean((x̂0⁻ − x_0)²)/w⁻)/β, per sample (B,).

        v⁺ = β·v + (1 − β)·v_old;  v⁻ = (1 + β)·v_old − β·v;  x̂0± = x_t − t·v±
        w± = stopgrad(mean|x̂0± − x_0|), at least 1e-5

    Args:
        clean: x_0 (B, N, C) float32.
        noisy: x_t (B, N, C) float32.
        t: (B,) float32 in (0, 1].
        velocity: v (B, N, C) float32, with gradient.
        old: v_old (B, N, C) float32.
        preference: r (B,) float32 in [0, 1].
        nft_beta: β > 0.
    """
    time = t.view(-1, 1, 1)
    positive = noisy - time * (nft_beta * velocity + (1 - nft_beta) * old) - clean
    negative = noisy - time * ((1 + nft_beta) * old - nft_beta * velocity) - clean
    loss = preference * _normalised(positive) + (1 - preference) * _normalised(negative)
    return loss / nft_beta


def _normalised(error: torch.Tensor) -> torch.Tensor:
    scale = error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
    return _mean_square(error) / scale


def _mean_square(values: torch.Tensor) -> torch.Tensor:
    return values.square().flatten(1).mean(1)
