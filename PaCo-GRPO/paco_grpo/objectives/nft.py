"""DiffusionNFT (arXiv 2509.16117): learn on the forward process, from positive and negative implicit policies.

| paper       | here                                    |
|-------------|-----------------------------------------|
| v_θ, v_old  | velocity, old velocity (adapter ``old``) |
| β           | train.nft_beta (mixing coefficient)     |
| r ∈ [0, 1]  | preference (B,)                         |
| x_t         | (1 − t)·x_0 + t·ε at the trained steps' σ |
| KL weight   | train.beta                              |
"""

from __future__ import annotations

from functools import partial

import torch

from paco_grpo.objectives.base import LossOutput, Snapshot, Step, mean_square, objective
from paco_grpo.objectives.forward import Noised, check_forward_steps, forward_steps
from paco_grpo.options.schema import TrainOptions
from paco_grpo.policies.base import Policy

# decay_type: flat, rate, hold
_DECAYS = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}


def old_decay(step: int, train: TrainOptions) -> float:
    """Decay of the old policy after ``step`` optimizer steps: min(max(step − flat, 0)·rate, hold).

    ``train.decay_type`` 0: always 0. 1 (default): flat 0, rate 0.001, hold 0.5. 2: flat 75, rate 0.0075, hold 0.999.
    """
    flat, rate, hold = _DECAYS[1 if train.decay_type is None else train.decay_type]
    return min(max(step - flat, 0) * rate, hold)


@objective(
    needs_noise_steps=False,
    steps=forward_steps(default=None),
    snapshots=(Snapshot("old", old_decay, samples_from=0),),
    gradient_steps=1,
    check=partial(check_forward_steps, default=None),
)
def nft(step: Step, policy: Policy, train: TrainOptions) -> LossOutput:
    """NFT loss + KL weight · mean((v − v_ref)²) at one σ. The reference forward happens only if the KL weight is not 0.

    Metrics: policy_loss, preference_mean, old_distance (mean (v − v_old)²) and, with a KL weight, kl.
    """
    preference = (step.advantages / train.adv_clip_max / 2 + 0.5).clamp(0, 1)
    noised = Noised(step, policy)
    old, velocity = noised.velocity("old"), noised.velocity()
    clean = step.rollout.clean_latents
    loss = nft_terms(clean, noised.latents, step.sigma, velocity, old, preference, train.nft_beta) * train.adv_clip_max
    metrics = {"policy_loss": loss, "preference_mean": preference, "old_distance": mean_square(velocity - old)}
    if train.beta != 0:
        metrics["kl"] = mean_square(velocity - noised.reference)
        loss = loss + train.beta * metrics["kl"]
    return LossOutput(loss, metrics)


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

    x_0, x_t, v and v_old are (B, N, C) float32; t and r are (B,).
    """
    time = t.view(-1, 1, 1)
    positive = noisy - time * (nft_beta * velocity + (1 - nft_beta) * old) - clean
    negative = noisy - time * ((1 + nft_beta) * old - nft_beta * velocity) - clean
    return (preference * _normalized(positive) + (1 - preference) * _normalized(negative)) / nft_beta


def _normalized(error: torch.Tensor) -> torch.Tensor:
    scale = error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
    return mean_square(error) / scale
