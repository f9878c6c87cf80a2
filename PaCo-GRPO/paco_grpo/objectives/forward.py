"""What the objectives on the forward process share (nft, awm, dgpo): which σ they train on, and velocities at x_σ."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from paco_grpo.objectives.base import Step, mean_square
from paco_grpo.options.schema import RunOptions, TrainOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import step_noise
from paco_grpo.types import Rollout

FRESH = (
    1 << 20
)  # times (n + 1): offset of the noise of inner epoch n, away from the rollout's and other epochs'


class Noised:
    """x_σ = (1 − σ)·x_0 + σ·ε of a step's samples, with fresh ε.

    Velocities are conditional: with true CFG, guidance is part of sampling and not of what is learned.

    Attributes:
        latents: x_σ (B, N, C) float32.
        target: u = ε − x_0 (B, N, C) float32.
    """

    def __init__(self, step: Step, policy: Policy, shared: bool = False) -> None:
        """``shared``: one ε for all samples of an item, not of each sample's own seed."""
        rollout, clean, time = step.rollout, step.rollout.clean_latents, step.sigma.view(-1, 1, 1)
        own, items = rollout.seeds.tolist(), rollout.item_ids.tolist()
        seeds = [(step.epoch_seed << 32) + item for item in items] if shared else own
        place = step.index if isinstance(step.index, int) else int(step.index * FRESH)
        noise = step_noise(seeds, (1 + step.inner_epoch) * FRESH + place, clean)
        self.latents, self.target = (1 - time) * clean + time * noise, noise - clean
        self._policy = policy
        self._arguments = (
            self.latents,
            step.sigma,
            rollout.conditioning,
            rollout.height,
            rollout.width,
        )

    def velocity(self, snapshot: str | None = None) -> torch.Tensor:
        """v (B, N, C) of the trained weights, or, without gradient, of a snapshot."""
        if snapshot is None:
            return self._policy.velocity(*self._arguments, guided=False)
        with torch.no_grad(), lora.snapshot(self._policy, snapshot):
            return self._policy.velocity(*self._arguments, guided=False)

    @cached_property
    def reference(self) -> torch.Tensor:
        """v (B, N, C) of the reference policy, without gradient."""
        with torch.no_grad(), lora.reference(self._policy):
            return self._policy.velocity(*self._arguments, guided=False)

    def error(self, velocity: torch.Tensor) -> torch.Tensor:
        """Matching error e (B,) = mean((v − u)²)."""
        return mean_square(velocity - self.target)


def sample_sigmas(
    num_steps: int, count: int, fraction: float, with_one: bool, rng: np.random.Generator
) -> list[int]:
    """``count`` steps of the schedule, one from each of as many equal parts of its noisy end.

    The end is step floor(N·``fraction``), exclusive; the start is step 0 (σ = 1) ``with_one``, else 1.
    """
    first, end = 1 - with_one, int(num_steps * fraction + 1e-9)
    bounds = [first + i * (end - first) // count for i in range(count + 1)]
    return [int(rng.integers(low, high)) for low, high in pairwise(bounds)]


def forward_steps(
    default: int | None,
) -> Callable[[TrainOptions, Rollout, np.random.Generator], Sequence[int]]:
    """``Objective.steps``: ``train.timesteps``, or ``train.num_sigmas`` sampled ones (default None: the noise steps)."""

    def steps(train: TrainOptions, rollout: Rollout, rng: np.random.Generator) -> Sequence[int]:
        if train.timesteps is not None:
            return train.timesteps
        count = train.num_sigmas or default
        if count is None:
            return [step.index for step in rollout.noise_steps]
        return sample_sigmas(
            len(rollout.sigmas) - 1, count, train.sigma_fraction, train.sigma_one, rng
        )

    return steps


def check_forward_steps(options: RunOptions, default: int | None) -> Iterator[str]:
    """``Objective.check`` for ``forward_steps``."""
    sample, train = options.sample, options.train
    for index in train.timesteps or ():
        if not 0 <= index < sample.num_steps:
            yield f"train.timesteps has step {index}, but sample.num_steps={sample.num_steps}"
    if train.timesteps is not None:
        return
    count = train.num_sigmas or default
    if count is None:
        if not (sample.noise_steps and sample.noise_level):
            yield "train.timesteps and train.num_sigmas are None and sampling has no noise step: set one of them"
        return
    if count > (
        steps := int(sample.num_steps * train.sigma_fraction + 1e-9) - (not train.sigma_one)
    ):
        yield (
            f"train.num_sigmas={count} is more than the {max(0, steps)} steps to sample from (sample.num_steps="
            f"{sample.num_steps}, train.sigma_fraction={train.sigma_fraction:g}, train.sigma_one={train.sigma_one})"
        )
