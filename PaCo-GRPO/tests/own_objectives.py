"""Methods as users write them, outside of the package, named by ``own_objectives:NAME`` in runs."""

import numpy as np
import torch

from paco_grpo.objectives import LossOutput, Objective, transition
from paco_grpo.objectives.base import mean_square
from paco_grpo.objectives.noised import Noised, NoisedObjective
from paco_grpo.objectives.ppo import Ppo
from paco_grpo.policies import lora
from paco_grpo.sampling.denoise import Transition


def dance(latents, velocity, sigma, sigma_next, sigma_first, noise_level):
    """DanceGRPO's step as its paper writes it, with the score."""
    at = sigma.view(-1, 1, 1)
    dt = (sigma_next - sigma).view(-1, 1, 1)
    clean = latents - at * velocity
    score = -(latents - (1 - at) * clean) / at**2
    mean = latents + (velocity - noise_level**2 / 2 * score) * dt
    s = torch.full_like(sigma, noise_level)
    return Transition(mean, s * (sigma - sigma_next).sqrt(), s)


class Window(Ppo):
    """MixGRPO's window, two steps long, which moves each epoch."""

    def noise_steps(self, epoch):
        steps = self.options.sample.noise_steps
        first = min(epoch, len(steps) - 2)
        return steps[first : first + 2]


class Extremes(Ppo):
    """The best and the worst image of each group are trained."""

    def keep(self, advantages, item_ids):
        mask = np.zeros(len(advantages), bool)
        for item_id in set(item_ids.tolist()):
            members = np.flatnonzero(item_ids == item_id)
            order = advantages[members].argsort()
            mask[members[order[[0, -1]]]] = True
        return mask


class FlowDpo(NoisedObjective):
    """Online Diffusion-DPO."""

    default_sigmas = 1
    whole_groups = True
    keep = Extremes.keep

    def __init__(self, options, strength=100.0):
        super().__init__(options)
        self.strength = strength

    def measure(self, step, policy):
        noised = Noised(step, policy, shared=True)
        return {"change": noised.error(noised.velocity()) - noised.error(noised.reference)}

    def per_group(self, group):
        best, worst = group.advantages.argmax(), group.advantages.argmin()
        change = group.measured["change"]
        half = self.strength / 2
        share = 1 / (1 + np.exp(-half * (change[best] - change[worst])))
        weight = np.zeros_like(change)
        weight[best] = 2 * half * share  # an image counts half of its pair
        weight[worst] = -weight[best]
        return {"weight": weight}

    def loss(self, step, policy):
        noised = Noised(step, policy, shared=True)
        return LossOutput(step.group["weight"] * noised.error(noised.velocity()))


class Distill(Objective):
    """Diffusion-OPD with one teacher."""

    def __init__(self, options, teacher):
        super().__init__(options)
        self.adapters = {"mine": teacher}

    def loss(self, step, policy):
        latents = step.noise.latents
        student = transition(policy, step.rollout, latents, step.index)
        with torch.no_grad(), lora.using_adapter(policy, "mine"):
            teacher = transition(policy, step.rollout, latents, step.index)
        return LossOutput(mean_square(student.mean - teacher.mean) / (2 * student.std.square()))


class Nothing(Ppo):
    def keep(self, advantages, item_ids):
        return advantages > 1e9


class Numbers(Ppo):
    """Returns numbers of images instead of a mask."""

    def keep(self, advantages, item_ids):
        return np.flatnonzero(advantages > 0)


class Late(Ppo):
    """Noise that leaves the schedule in the second epoch."""

    def noise_steps(self, epoch):
        return [1, 2 + epoch]


class Unchosen(Ppo):
    """Trains no step with seed 7."""

    def steps(self, rollout, rng):
        steps = super().steps(rollout, rng)
        return [] if self.options.seed == 7 else steps
