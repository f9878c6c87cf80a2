"""A user's own objective, named by import path: group-coupled matching errors at sampled σ, with a first pass."""

import numpy as np
import torch

from paco_grpo.objectives import LossOutput, Snapshot, objective
from paco_grpo.objectives.base import mean_square
from paco_grpo.sampling.denoise import step_noise

BETA = 20.0


def matching_error(step, policy):
    """e (B,) = mean((v − u)²) at σ, noise seeded by the sample's own seed."""
    clean, sigma = step.rollout.clean_latents, step.sigma.view(-1, 1, 1)
    noise = step_noise(step.rollout.seeds.tolist(), 777, clean)
    noisy = (1 - sigma) * clean + sigma * noise
    velocity = policy.velocity(noisy, step.sigma, step.rollout.conditioning, step.rollout.height, step.rollout.width)
    return mean_square(velocity - (noise - clean))


def sigmas(train, rollout, rng):
    return [float(sigma) for sigma in np.sort(rng.uniform(0.2, 1.0, 2))]


def group_weights(errors, item_ids, advantages, train):
    """sigmoid(s_g)·A_i with s_g = (β/K)·Σ A_i·e_i, per step."""
    weights = np.zeros_like(errors)
    for item in np.unique(item_ids):
        group = item_ids == item
        total = BETA / group.sum() * (advantages[group, None] * errors[group]).sum(axis=0)
        weights[group] = advantages[group, None] / (1 + np.exp(-total))
    return weights


@objective(
    needs_noise_steps=False,
    steps=sigmas,
    check=lambda options: (),
    gradient_steps=1,
    snapshots=(Snapshot("slow", decay=lambda step, train: 0.5),),
    first_pass=lambda step, policy, train: matching_error(step, policy),
    group_weights=group_weights,
)
def coupled(step, policy, train):
    error = matching_error(step, policy)
    return LossOutput(step.group_weights * error, {"matching_error": error})


def reinforce(step, policy, train):
    """A plain function is an objective, too."""
    log_prob = step.transition(policy).log_prob(step.noise.next_latents)
    return LossOutput(-step.advantages * log_prob, {"log_prob_mean": log_prob})


def joint_loss(errors, item_ids, advantages):
    """What ``coupled`` differentiates: mean over samples of K/β·softplus(s_g), for one step."""
    total = 0.0
    for item in np.unique(item_ids):
        group = torch.from_numpy(item_ids == item)
        count = int(group.sum())
        total = total + count / BETA * torch.nn.functional.softplus(
            BETA / count * (advantages[group] * errors[group]).sum()
        )
    return total / len(item_ids)
