"""A policy small enough for finite differences: v = a·x + b·σ·c, with two parameters, and a counter
of forwards.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from paco_grpo.objectives import MicroBatch
from paco_grpo.objectives.groups import measure_samples, set_group_values
from paco_grpo.objectives.noised import Noised
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.types import Conditioning, Item


@dataclass
class ToyConditioning(Conditioning):
    direction: torch.Tensor  # (B, L, C)


class _Velocity(nn.Module, BaseTunerLayer):
    """Switched like a LoRA layer: ``base`` without adapters, ``current`` in the trained one, and
    others by their names.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.current = nn.Parameter(torch.tensor([0.3, -0.7], dtype=dtype))
        self.base = torch.tensor([0.1, -0.2], dtype=dtype)
        self.old = torch.tensor([0.25, -0.6], dtype=dtype)
        self.slow = torch.tensor([0.35, -0.65], dtype=dtype)
        self.teacher_x = torch.tensor([0.5, -0.3], dtype=dtype)
        self.teacher_y = torch.tensor([0.2, -0.9], dtype=dtype)
        self.in_use = "current"

    def forward(self, x, sigma, direction):
        a, b = getattr(self, self.in_use)
        return a * x + b * sigma.view(-1, 1, 1) * direction

    def enable_adapters(self, enabled):
        self.in_use = "current" if enabled else "base"

    def set_adapter(self, names):
        (name,) = [names] if isinstance(names, str) else names
        self.in_use = "current" if name == "default" else name


class ToyPolicy(Policy):
    size_multiple = 4
    device = torch.device("cpu")

    def __init__(
        self, dtype: torch.dtype = torch.float32, tokens: int = 6, channels: int = 4
    ) -> None:
        self.dtype = dtype
        self.transformer = _Velocity(dtype)
        self.shape = (tokens, channels)
        self.calls: list[int] = []

    @classmethod
    def from_pretrained(cls, path, settings):
        return cls()

    def autocast(self):
        return nullcontext()  # the toy computes in its own dtype

    def encode(self, items, text_tokens=None):
        return ToyConditioning(torch.stack([self._normal(100 + item.item_id) for item in items]))

    def sigmas(self, num_steps, height, width):
        return torch.cat([torch.linspace(1, 1 / num_steps, num_steps), torch.zeros(1)]).to(
            self.dtype
        )

    def initial_latents(self, seeds, height, width):
        return torch.stack([self._normal(seed) for seed in seeds])

    def velocity(self, latents, sigma, conditioning, height, width, guided=True):
        self.calls.append(latents.shape[0])
        return self.transformer(latents, sigma, conditioning.direction)

    def decode(self, latents, height, width):
        raise NotImplementedError

    def _normal(self, seed):
        return torch.randn(
            self.shape, generator=torch.Generator().manual_seed(int(seed)), dtype=self.dtype
        )


def sample(policy, moved=True):
    """A toy rollout; the weights then move a little, so that ratios differ from 1."""
    conditioning = policy.encode([Item(i, str(i)) for i in range(3)])
    draws = Draws([0, 1, 0], [21, 22, 23], 8, 12)
    result = rollout(policy, conditioning, draws, Sampling(4, (0, 2), noise_level=0.8))
    policy.calls.clear()
    if moved:
        with torch.no_grad():
            policy.transformer.current.add_(torch.tensor([0.02, -0.05]))
    return result


def numpy_step(x, v, sigma, following, first, a, kind="flow_sde"):
    """Mean, s and standard deviation of a noise step in float64 (docs/method.md §4); ``first``: σ_1
    of the schedule.
    """
    if kind == "dance_sde":  # as the paper writes it, with the score
        clean = x - sigma * v
        score = -(x - (1 - sigma) * clean) / sigma**2
        mean = x + (v - a**2 / 2 * score) * (following - sigma)
        return mean, a, a * np.sqrt(sigma - following)
    if kind == "cps":
        s = following * np.sin(a * np.pi / 2)
        mean = (1 - following) * (x - sigma * v) + np.sqrt(max(following**2 - s**2, 0)) * (
            x + (1 - sigma) * v
        )
        return mean, s, s
    s = a * np.sqrt(sigma / (1 - (first if sigma == 1 else sigma)))
    dt = following - sigma
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s, s * np.sqrt(-dt)


def compare_groups(objective, steps, policy):
    """What the trainer does before an optimizer step, in the precision of the advantages."""
    micro_batch = MicroBatch(
        samples=steps[0].rollout.split(),
        positions=np.arange(len(steps[0].rollout)),
        advantages=steps[0].advantages.double().numpy(),
        indices=[step.index for step in steps],
        weight=1.0,
        epoch_seed=steps[0].epoch_seed,
    )
    samples = measure_samples(objective, [micro_batch], policy)
    set_group_values(objective, [micro_batch], samples)
    for step, whole in zip(steps, micro_batch.build_steps(), strict=True):
        step.group = {name: row.to(step.advantages.dtype) for name, row in whole.group.items()}
        step.frozen = whole.frozen


def joint_dgpo(step, policy, train):
    """The loss of DGPO's groups as the paper writes it, from one graph over all samples."""
    noised = Noised(step, policy, shared=True)
    change = noised.error(noised.velocity()) - noised.error(noised.reference)
    total = 0.0
    for item in step.rollout.item_ids.unique():
        group = step.rollout.item_ids == item
        advantages = step.advantages[group] - step.advantages[group].mean()
        s = train.dgpo_beta * (advantages * change[group]).mean()
        # By default, it is linear above 20, which is off by exp(-20).
        softplus = torch.nn.functional.softplus(s, threshold=100)
        total = total + int(group.sum()) / train.dgpo_beta * softplus
    return total
