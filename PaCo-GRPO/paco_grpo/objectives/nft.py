"""DiffusionNFT (arXiv 2509.16117): positive and negative implicit policies at noised images.

| paper       | here                                    |
|-------------|-----------------------------------------|
| v_θ, v_old  | velocity, old velocity (adapter ``old``) |
| β           | train.nft_beta (mixing coefficient)     |
| r ∈ [0, 1]  | preference (B,)                         |
| x_t         | (1 − t)·x_0 + t·ε at the trained steps' σ |
| KL weight   | train.beta                              |
"""

import torch
from typing_extensions import override

from paco_grpo.objectives.base import LossOutput, Snapshot, Step, mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies.base import Policy

# train.decay_type → (flat, rate, hold) of the old policy; with 0 it follows at once
_DECAYS = {0: (0, 0.0, 0.0), 1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}


class Nft(NoisedObjective):
    """adv_clip_max/β · (r·e⁺/w⁺ + (1 − r)·e⁻/w⁻) + KL weight · mean((v − v_ref)²) at one σ.

        v⁺ = β·v + (1 − β)·v_old;  v⁻ = (1 + β)·v_old − β·v
        x̂0± = x_t − t·v±;  e± = mean((x̂0± − x_0)²)
        w± = stopgrad(mean|x̂0± − x_0|), at least 1e-5

    Images are sampled with the old policy. Metrics: policy_loss, preference_mean, old_distance
    (mean (v − v_old)²) and, with a KL weight, kl.
    """

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        self.snapshots = (Snapshot("old", self.old_decay, samples_from=0),)

    def old_decay(self, step: int) -> float:
        """The decay of the old policy: min(max(step − flat, 0)·rate, hold).

        ``step`` counts optimizer steps. ``train.decay_type`` chooses the numbers.
        """
        flat, rate, hold = _DECAYS[self.train.decay_type]
        return min(max(step - flat, 0) * rate, hold)

    @override
    def loss(self, step: Step, policy: Policy) -> LossOutput:
        train = self.train
        beta = train.nft_beta
        preference = (step.advantages / train.adv_clip_max / 2 + 0.5).clamp(0, 1)
        noised = Noised(step, policy)
        old = noised.velocity("old")
        velocity = noised.velocity()
        positive = _normalized_error(beta * velocity + (1 - beta) * old, noised, step)
        negative = _normalized_error((1 + beta) * old - beta * velocity, noised, step)
        loss = (preference * positive + (1 - preference) * negative) / beta * train.adv_clip_max
        metrics = {
            "policy_loss": loss,
            "preference_mean": preference,
            "old_distance": mean_square(velocity - old),
        }
        if train.beta != 0:
            metrics["kl"] = mean_square(velocity - noised.reference)
            loss = loss + train.beta * metrics["kl"]
        return LossOutput(loss, metrics)


def _normalized_error(velocity: torch.Tensor, noised: Noised, step: Step) -> torch.Tensor:
    """e/w (B,) of the clean latents that ``velocity`` predicts."""
    time = step.sigma.view(-1, 1, 1)
    error = noised.latents - time * velocity - step.rollout.clean_latents
    normalizer = error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
    return mean_square(error) / normalizer
