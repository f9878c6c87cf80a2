"""What the objectives on the forward process (nft, awm, …) share: σ, x_σ and velocities."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.objectives.base import Objective, Step, mean_square
from paco_grpo.options.schema import RunOptions
from paco_grpo.policies import lora
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import step_noise
from paco_grpo.types import Rollout

# Training noise of inner epoch i uses step numbers from FRESH·(i + 1), which rollouts never reach.
FRESH = 1 << 20


class NoisedObjective(Objective):
    """Trains on noised clean latents at sampled σ; sampling needs no noise steps.

    Attributes:
        default_sigmas: σ in each pass over the samples where ``train.num_sigmas`` is None; None =
            one for each noise step of the rollout.
    """

    needs_noise_steps = False
    gradient_steps = 1
    default_sigmas: int | None = None

    @override
    def steps(self, rollout: Rollout, rng: np.random.Generator) -> Sequence[int]:
        """``train.timesteps``, or ``train.num_sigmas`` sampled positions of the schedule."""
        train = self.train
        if train.timesteps is not None:
            return train.timesteps
        count = train.num_sigmas or self.default_sigmas
        if count is None:
            return [noise_step.index for noise_step in rollout.noise_steps]
        num_steps = len(rollout.sigmas) - 1
        return sample_sigmas(num_steps, count, train.sigma_fraction, train.sigma_one, rng)

    @classmethod
    @override
    def check(cls, options: RunOptions) -> Iterator[str]:
        sample = options.sample
        train = options.train
        for index in train.timesteps or ():
            if not 0 <= index < sample.num_steps:
                yield f"train.timesteps has step {index}, but sample.num_steps={sample.num_steps}"
        if train.timesteps is not None:
            return
        count = train.num_sigmas or cls.default_sigmas
        if count is None:
            if not (sample.noise_steps and sample.noise_level):
                yield (
                    "train.timesteps and train.num_sigmas are None and sampling has no noise step: "
                    "set one of them"
                )
            return
        first, end = _sigma_range(sample.num_steps, train.sigma_fraction, train.sigma_one)
        if count > end - first:
            yield (
                f"train.num_sigmas={count} is more than the {max(0, end - first)} steps to sample "
                f"from (sample.num_steps={sample.num_steps}, "
                f"train.sigma_fraction={train.sigma_fraction:g}, "
                f"train.sigma_one={train.sigma_one})"
            )


class Noised:
    """x_σ = (1 − σ)·x_0 + σ·ε of a step's samples, with fresh ε.

    Velocities are conditional: with true CFG, guidance is part of sampling and not of what is
    learned.

    Attributes:
        latents: x_σ (B, L, C) float32.
        target: u = ε − x_0 (B, L, C) float32.
    """

    def __init__(self, step: Step, policy: Policy, shared: bool = False) -> None:
        """``shared``: one ε for all samples of an item, not of each sample's own seed."""
        rollout = step.rollout
        clean = rollout.clean_latents
        seeds = rollout.seeds.tolist()
        if shared:
            seeds = [(step.epoch_seed << 32) + item_id for item_id in rollout.item_ids.tolist()]
        noise = step_noise(seeds, (1 + step.inner_epoch) * FRESH + step.index, clean)
        time = step.sigma.view(-1, 1, 1)
        self.latents = (1 - time) * clean + time * noise
        self.target = noise - clean
        self._policy = policy
        self._step = step
        self._shared = shared

    def velocity(self, adapter: str | None = None) -> torch.Tensor:
        """v (B, L, C) of the trained weights, or, without gradient, of another adapter."""
        if adapter is None:
            return self._predict()
        return self._frozen(adapter, lora.using_adapter(self._policy, adapter))

    @property
    def reference(self) -> torch.Tensor:
        """v (B, L, C) of the reference policy, without gradient."""
        return self._frozen("the reference", lora.reference_weights(self._policy))

    def error(self, velocity: torch.Tensor) -> torch.Tensor:
        """Matching error e (B,) = mean((v − u)²)."""
        return mean_square(velocity - self.target)

    def _frozen(self, name: str, weights: AbstractContextManager[None]) -> torch.Tensor:
        """v (B, L, C) of other weights, computed once for each step of an update."""
        frozen = self._step.frozen
        key = (name, self._shared)  # the latents of shared noise are others
        if key not in frozen:
            with torch.no_grad(), weights:
                frozen[key] = self._predict()
        return frozen[key]

    def _predict(self) -> torch.Tensor:
        rollout = self._step.rollout
        return self._policy.velocity(
            self.latents,
            self._step.sigma,
            rollout.conditioning,
            rollout.height,
            rollout.width,
            guided=False,
        )


def check_groups(options: RunOptions) -> Iterator[str]:
    """Yield problems of an objective that compares a prompt's images with each other.

    It also compares the trained model with its reference.
    """
    name = f"train.loss_type={options.train.loss_type!r}"
    if not options.use_lora:
        yield (
            f"use_lora=False cannot be used with {name}: "
            "its reference is the model without its adapter"
        )
    if not options.per_prompt_stat_tracking or options.sample.num_images_per_prompt < 2:
        yield (
            f"{name} compares images of one prompt: it needs per_prompt_stat_tracking=True and at "
            "least 2 sample.num_images_per_prompt"
        )


def sample_sigmas(
    num_steps: int, count: int, fraction: float, with_one: bool, rng: np.random.Generator
) -> list[int]:
    """``count`` steps of the schedule, one from each of as many equal parts of its noisy end.

    The end is step floor(``num_steps``·``fraction``), exclusive; the start is step 0 (σ = 1)
    ``with_one``, else 1.
    """
    first, end = _sigma_range(num_steps, fraction, with_one)
    bounds = [first + i * (end - first) // count for i in range(count + 1)]
    return [int(rng.integers(low, high)) for low, high in pairwise(bounds)]


def _sigma_range(num_steps: int, fraction: float, with_one: bool) -> tuple[int, int]:
    """First step to sample from, and the step after the last one."""
    first = 0 if with_one else 1
    end = int(num_steps * fraction + 1e-9)
    return first, end
