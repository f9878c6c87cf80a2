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

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from paco_grpo.objectives.base import Snapshot, Step, Terms, mean_square, objective, recorded_steps
from paco_grpo.options.schema import RunOptions, TrainOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import step_noise
from paco_grpo.types import Rollout

# Keeps the fresh noise apart from the steps' own noise: it is seeded by (seed, step + this).
_FRESH = 1 << 20

# decay_type: flat, rate, hold
_DECAYS = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}


def old_decay(step: int, train: TrainOptions) -> float:
    """Decay of the old policy after ``step`` optimizer steps: min(max(step − flat, 0)·rate, hold).

    ``train.decay_type`` 0: always 0. 1 (default): flat 0, rate 0.001, hold 0.5. 2: flat 75, rate 0.0075, hold 0.999.
    """
    flat, rate, hold = _DECAYS[1 if train.decay_type is None else train.decay_type]
    return min(max(step - flat, 0) * rate, hold)


def _steps(train: TrainOptions, rollout: Rollout, rng: np.random.Generator) -> Sequence[int]:
    """``train.timesteps``, or else the noise steps."""
    return recorded_steps(train, rollout, rng) if train.timesteps is None else train.timesteps


def _check(options: RunOptions) -> Iterator[str]:
    sample, train = options.sample, options.train
    if train.timesteps is None and not (sample.noise_steps and sample.noise_level):
        yield "train.timesteps is None and sampling has no noise step: set train.timesteps, or there is no step to train on"
    for index in train.timesteps or ():
        if not 0 <= index < sample.num_steps:
            yield f"train.timesteps has step {index}, but sample.num_steps={sample.num_steps}"


@objective(needs_noise_steps=False, steps=_steps, snapshots=(Snapshot("old", old_decay, samples=True),), gradient_steps=1,
           check=_check)  # fmt: skip
def nft(step: Step, policy: Policy, train: TrainOptions) -> Terms:
    """NFT loss + KL weight · mean((v − v_ref)²) at one σ.

    v is the conditional velocity: with true CFG, guidance is part of sampling and not of what is learned. The fresh noise
    of a sample is seeded by its own seed and the step, so its loss does not depend on its batch, and a resumed run uses
    the same noise. The reference forward happens only if the KL weight is not 0.

    Metrics: policy_loss, preference_mean, old_distance (mean (v − v_old)²) and, with a KL weight, kl.
    """
    rollout, clean, t = step.rollout, step.rollout.clean_latents, step.sigma
    preference = (step.advantages / train.adv_clip_max / 2 + 0.5).clamp(0, 1)
    noise = step_noise(rollout.seeds.tolist(), _FRESH + step.index, clean)
    noisy = (1 - t.view(-1, 1, 1)) * clean + t.view(-1, 1, 1) * noise
    arguments = (noisy, t, rollout.conditioning, rollout.height, rollout.width)
    with torch.no_grad(), lora.snapshot(policy, "old"):
        old = policy.velocity(*arguments, guided=False)
    velocity = policy.velocity(*arguments, guided=False)
    loss = nft_terms(clean, noisy, t, velocity, old, preference, train.nft_beta) * train.adv_clip_max
    metrics = {"policy_loss": loss, "preference_mean": preference, "old_distance": mean_square(velocity - old)}
    if train.beta != 0:
        with torch.no_grad(), lora.reference(policy):
            reference = policy.velocity(*arguments, guided=False)
        metrics["kl"] = mean_square(velocity - reference)
        loss = loss + train.beta * metrics["kl"]
    return Terms(loss, metrics)


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
    return (preference * _normalized(positive) + (1 - preference) * _normalized(negative)) / nft_beta


def _normalized(error: torch.Tensor) -> torch.Tensor:
    scale = error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
    return mean_square(error) / scale
