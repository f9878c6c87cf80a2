"""DiffusionNFT (arXiv 2509.16117): learn on the forward process, from positive and negative implicit policies.

| paper       | here                                    |
|-------------|-----------------------------------------|
| v_θ, v_old  | velocity, old velocity (adapter ``old``) |
| β           | train.nft_beta (mixing coefficient)     |
| r ∈ [0, 1]  | preference (B,)                         |
| x_t         | (1 − t)·x_0 + t·ε at the trained steps' σ |
| KL weight   | train.beta                              |
"""

from functools import partial

import torch

from paco_grpo.objectives.base import LossOutput, Snapshot, Step, mean_square, objective, with_kl
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
    """adv_clip_max/β · (r·e⁺/w⁺ + (1 − r)·e⁻/w⁻) + KL weight · mean((v − v_ref)²) at one σ.

        v⁺ = β·v + (1 − β)·v_old;  v⁻ = (1 + β)·v_old − β·v;  x̂0± = x_t − t·v±;  e± = mean((x̂0± − x_0)²)
        w± = stopgrad(mean|x̂0± − x_0|), at least 1e-5

    Metrics: policy_loss, preference_mean, old_distance (mean (v − v_old)²) and, with a KL weight, kl.
    """
    preference = (step.advantages / train.adv_clip_max / 2 + 0.5).clamp(0, 1)
    noised = Noised(step, policy)
    old, velocity = noised.velocity("old"), noised.velocity()
    time, beta = step.sigma.view(-1, 1, 1), train.nft_beta

    def normalized_error(mixed: torch.Tensor) -> torch.Tensor:
        error = noised.latents - time * mixed - step.rollout.clean_latents
        return mean_square(error) / error.detach().abs().flatten(1).mean(1).clamp_min(1e-5)

    positive = normalized_error(beta * velocity + (1 - beta) * old)
    negative = normalized_error((1 + beta) * old - beta * velocity)
    loss = (preference * positive + (1 - preference) * negative) / beta * train.adv_clip_max
    metrics = {
        "policy_loss": loss,
        "preference_mean": preference,
        "old_distance": mean_square(velocity - old),
    }
    return with_kl(loss, metrics, train.beta, lambda: mean_square(velocity - noised.reference))
