"""From noise to latents: the rollout, and the recomputation of its noise steps under the current weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import merged
from paco_grpo.policies.performance.cache import first_block_cache
from paco_grpo.policies.performance.onednn import through_onednn
from paco_grpo.policies.performance.quantize import int8_copies
from paco_grpo.policies.performance.repeated import computed_once
from paco_grpo.sampling.sde import Transition, cps_step, euler_step, sde_step
from paco_grpo.types import Conditioning, NoiseStep, Rollout, to_device


@dataclass(frozen=True)
class Tail:
    """How the steps after the last noise step are computed; the default is the schedule's own Euler steps.

    They enter no log-probability: an approximation here changes the images that are scored (and x_0, which DiffusionNFT
    trains on), never a ratio.

    Attributes:
        steps: Maximum number of steps; None = those of the schedule.
        order: 1 = Euler; 2 = the two-step Adams-Bashforth method, which needs no additional forward pass.
        cache: Threshold of the first-block cache, 0 = off.
        weights: ``int8`` = 8-bit copies of the transformer's large layers; None = the weights themselves.
    """

    steps: int | None = None
    order: int = 1
    cache: float = 0.0
    weights: str | None = None

    def sigmas(self, sigmas: torch.Tensor) -> torch.Tensor:
        """The tail's schedule: ``steps`` + 1 of ``sigmas`` (n + 1,), evenly spaced by index to keep the schedule's shape."""
        count = len(sigmas) - 1
        if self.steps is None or self.steps >= count:
            return sigmas
        return sigmas[torch.from_numpy(np.linspace(0, count, self.steps + 1).round().astype(np.int64))]


@torch.no_grad()
def rollout(
    policy: Policy,
    conditioning: Conditioning,
    item_ids: Sequence[int] | torch.Tensor,
    seeds: Sequence[int],
    height: int,
    width: int,
    *,
    num_steps: int,
    noise_steps: Sequence[int] = (),
    noise_level: float = 0.0,
    cps: bool = False,
    group_index: torch.Tensor | None = None,
    initial_seeds: Sequence[int] | None = None,
    merge_lora: bool = False,
    tail: Tail = Tail(),
) -> Rollout:
    """Sample B images' latents (docs/method.md §4): Euler steps, with noise injected at ``noise_steps`` only.

    Args:
        policy: The generator with the weights to sample from.
        conditioning: len B, on the policy's device.
        item_ids: (B,), stored in the result.
        seeds: B integers ≥ 0; the noise of sample b at step i depends on (seeds[b], i) alone, never on the batch.
        height: Pixels, a multiple of the policy's ``size_multiple``.
        width: Pixels, a multiple of the policy's ``size_multiple``.
        num_steps: T.
        noise_steps: Indices of the noisy steps; () = deterministic sampling (evaluation).
        noise_level: a; at 0 no step is noisy and none is recorded.
        cps: Flow-CPS instead of Flow-SDE.
        group_index: (B,) int64 for ``same_latent``: samples with equal index (of the same item) share the initial noise, and
            the steps before the first noise step are computed once per distinct index.
        initial_seeds: B seeds of the initial noise; default ``seeds``. With ``group_index``, each group uses the value
            of its first member: pass equal values within a group that is spread over batches or processes.
        merge_lora: Merge the LoRA into the base weights for noiseless steps, in float32 on a CPU computed by oneDNN: faster,
            equal up to rounding. Noise steps are never merged, so that their log-probabilities are the ones that training
            computes.
        tail: How the steps after the last noise step are computed; without noise there is no tail.

    Raises:
        ValueError: Sizes disagree, or a noise step lies outside the schedule.
    """
    steps = sorted(noise_steps) if noise_level != 0 else []
    if steps and not 0 <= steps[0] <= steps[-1] < num_steps:
        raise ValueError(f"noise steps {steps} lie outside the {num_steps} sampling steps (0 to {num_steps - 1})")
    initial_seeds = list(seeds if initial_seeds is None else initial_seeds)
    given = {"item_ids": item_ids, "seeds": seeds, "initial_seeds": initial_seeds, "group_index": group_index}
    for name, values in given.items():
        if values is not None and len(values) != len(conditioning):
            raise ValueError(f"{name} has {len(values)} entries, but the conditioning has {len(conditioning)} rows")
    sigmas = policy.sigmas(num_steps, height, width)
    first_noise_step = steps[0] if steps else num_steps

    def denoise(x: torch.Tensor, conditioning: Conditioning, sigmas: torch.Tensor, tail: Tail = Tail()) -> torch.Tensor:
        """Deterministic steps from the first to the last of ``sigmas``."""
        sigmas = tail.sigmas(sigmas)
        with ExitStack() as stack:
            if merge_lora and len(sigmas) > 1:
                stack.enter_context(merged(policy))
                if tail.weights is None:  # their copies take the place of layers
                    stack.enter_context(through_onednn(policy))
            if tail.weights is not None and len(sigmas) > 1:
                stack.enter_context(int8_copies(policy))
            if tail.cache > 0 and len(sigmas) > 2:
                stack.enter_context(first_block_cache(policy, tail.cache))
            stack.enter_context(computed_once(policy.constant_parts()))
            return integrate(lambda x, s: policy.velocity(x, s, conditioning, height, width), x, sigmas, tail.order)

    with policy.autocast():  # around all forwards, so that the LoRA's weights are cast once for all of them
        if group_index is None:
            x = policy.initial_latents(initial_seeds, height, width)
            x = denoise(x, conditioning, sigmas[: first_noise_step + 1])
        else:
            groups = group_index.tolist()
            distinct = list(dict.fromkeys(groups))
            first = [groups.index(group) for group in distinct]
            row = torch.tensor([distinct.index(group) for group in groups])
            x = policy.initial_latents([initial_seeds[b] for b in first], height, width)
            x = denoise(x, conditioning.select(first), sigmas[: first_noise_step + 1])[to_device(row, x.device)]

        recorded = []
        for i, until in zip(steps, [*steps, num_steps][1:], strict=True):
            transition = transition_at(policy, x, conditioning, sigmas, i, height, width, noise_level, cps)
            next_x = transition.sample(step_noise(seeds, i, x))
            recorded.append(NoiseStep(i, x, next_x, transition.mean, transition.log_prob(next_x)))
            x = denoise(next_x, conditioning, sigmas[i + 1 : until + 1], tail if until == num_steps else Tail())

    return Rollout(
        item_ids=torch.as_tensor(item_ids, dtype=torch.int64),
        seeds=torch.as_tensor(list(seeds), dtype=torch.int64),
        clean_latents=x,
        conditioning=conditioning,
        noise_steps=recorded,
        sigmas=sigmas,
        height=height,
        width=width,
        noise_level=float(noise_level),
        cps=cps,
    )


def transition_at(
    policy: Policy,
    latents: torch.Tensor,
    conditioning: Conditioning,
    sigmas: torch.Tensor,
    step: int,
    height: int,
    width: int,
    noise_level: float,
    cps: bool,
) -> Transition:
    """Distribution of x' at noise step ``step`` under the policy's current weights, for x_t ``latents`` (B, N, C).

    Rollout and training both call this function, which is why the first ratio is 1.
    """
    sigma, sigma_next = _sigma_pair(sigmas, step, latents)
    velocity = policy.velocity(latents, sigma, conditioning, height, width)
    step_function = cps_step if cps else sde_step
    return step_function(latents, velocity, sigma, sigma_next, float(sigmas[1]), noise_level)


def current_transition(policy: Policy, rollout: Rollout, step: NoiseStep) -> Transition:
    """Distribution of x' under the current weights at a recorded noise step of ``rollout`` (len B)."""
    return transition_at(
        policy,
        step.latents,
        rollout.conditioning,
        rollout.sigmas,
        step.index,
        rollout.height,
        rollout.width,
        rollout.noise_level,
        rollout.cps,
    )


def recompute_old(policy: Policy, rollout: Rollout, as_trained: bool = False) -> Rollout:
    """The rollout with ``mean`` and ``log_prob`` recomputed under the current weights (``old_log_prob='recompute'``).

    In low precision, another batch size or kernel in training gives other numbers than the rollout did.

    Args:
        policy: The generator.
        rollout: len B.
        as_trained: Compute with gradients enabled: compiled blocks have one graph with and another without them. One step's
            activations are then held at a time, as in training.
    """
    steps = []
    for step in rollout.noise_steps:
        with torch.set_grad_enabled(as_trained):
            transition = current_transition(policy, rollout, step)
        mean = transition.mean.detach()
        log_prob = dataclasses.replace(transition, mean=mean).log_prob(step.next_latents)
        steps.append(dataclasses.replace(step, mean=mean, log_prob=log_prob))
    return dataclasses.replace(rollout, noise_steps=steps)


def step_noise(seeds: Sequence[int] | torch.Tensor, step: int, like: torch.Tensor) -> torch.Tensor:
    """Standard normal noise with the shape (B, ...) and device of ``like``, float32; row b from (seeds[b], step) alone."""
    # NumPy's SeedSequence, because torch's CPU generator uses only 32 bits of a seed.
    shape = tuple(like.shape[1:])
    rows = [np.random.default_rng([int(seed), step]).standard_normal(shape, dtype=np.float32) for seed in seeds]
    return to_device(torch.from_numpy(np.stack(rows)), like.device)


def integrate(
    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    sigmas: torch.Tensor,
    order: int = 1,
) -> torch.Tensor:
    """dx/dσ = v(x, σ) from the first to the last of ``sigmas``.

    Order 2 extrapolates the velocity to the middle of the step from its last two values (Adams-Bashforth with variable
    step lengths: Hairer, Nørsett, Wanner, Solving Ordinary Differential Equations I, III.5); its first step is Euler's.

    Args:
        velocity: (x (B, N, C), σ (B,)) → (B, N, C).
        x: (B, N, C) at the first σ.
        sigmas: (n + 1,), descending.
        order: 1 or 2.
    """
    last: tuple[torch.Tensor, float] | None = None
    for i in range(len(sigmas) - 1):
        sigma, sigma_next = _sigma_pair(sigmas, i, x)
        v = velocity(x, sigma)
        slope = v
        if order == 2:
            step = float(sigmas[i + 1] - sigmas[i])
            if last is not None:
                slope = v + step / (2 * last[1]) * (v - last[0])
            last = v, step
        x = euler_step(x, slope, sigma, sigma_next)
    return x


def _sigma_pair(sigmas: torch.Tensor, step: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """σ at ``step`` and at the next step, (B,) each, on the device of ``like`` (B, ...)."""
    pair = to_device(sigmas[step : step + 2], like.device)
    return pair[0].expand(like.shape[0]), pair[1].expand(like.shape[0])
