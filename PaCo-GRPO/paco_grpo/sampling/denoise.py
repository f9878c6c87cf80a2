"""From noise to latents: the rollout, and its noise steps under the current weights.

| paper                         | here                                    |
|-------------------------------|-----------------------------------------|
| x_t, x'                       | latents, next_latents (B, L, C)         |
| v                             | velocity (B, L, C)                      |
| σ_i, σ_{i+1}, dt              | sigma, sigma_next, sigma_next − sigma   |
| σ_1 (second of the schedule)  | sigma_first                             |
| a                             | noise_level                             |
| s                             | Transition.s (B,)                       |
| s·sqrt(−dt) (SDE), s (CPS)    | Transition.std (B,)                     |

``TRANSITIONS`` has the kinds of noise steps. Everything is float32; each sample has its own σ, and
nothing is reduced over the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from paco_grpo.names import find_function
from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import merged
from paco_grpo.types import Conditioning, NoiseStep, Rollout, to_device

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (x (B, L, C), σ (B,)) → v


@dataclass(frozen=True)
class Sampling:
    """How latents are denoised.

    The steps after the last noise step, the tail, enter no log-probability: an approximation there
    changes the images that are scored, never a ratio. Without noise there is no tail.
    """

    num_steps: int  # T
    noise_steps: Sequence[int] = ()  # ascending; () = deterministic sampling (evaluation)
    noise_level: float = 0.0  # a; at 0 no step is noisy and none is recorded
    transition: str = "flow_sde"  # of a noise step, as in ``find_transition``
    # In steps without noise: those with noise must have the log-probabilities of training.
    merge_lora: bool = False
    # The tail is at most this long and of second order; None = the Euler steps of the schedule.
    tail_steps: int | None = None

    def tail(self, sigmas: torch.Tensor) -> torch.Tensor:
        """``tail_steps`` + 1 of ``sigmas``, evenly spaced by index.

        This keeps the shape of the schedule.
        """
        count = len(sigmas) - 1
        if self.tail_steps is None or self.tail_steps >= count:
            return sigmas
        indices = np.linspace(0, count, self.tail_steps + 1).round().astype(np.int64)
        return sigmas[torch.from_numpy(indices)]


@dataclass(frozen=True)
class Draws:
    """B images of one size to draw from a policy: their seeds.

    The noise of sample b at step i depends on (seeds[b], i) alone, never on the batch.
    """

    item_ids: Sequence[int] | torch.Tensor  # (B,), for the rollout's record
    seeds: Sequence[int]  # (B,) ≥ 0
    height: int  # pixels, a multiple of the policy's ``size_multiple``
    width: int  # pixels, a multiple of it too
    # (B,) seeds of the initial noise for ``same_latent``: for samples of equal seed (and item),
    # the steps before the first noise step are computed once. None = ``seeds``.
    initial_seeds: Sequence[int] | None = None


@torch.no_grad()
def rollout(
    policy: Policy, conditioning: Conditioning, draws: Draws, sampling: Sampling
) -> Rollout:
    """Sample the latents of B images (docs/method.md §4): Euler steps, noise at noise steps.

    Args:
        policy: With the weights to sample from.
        conditioning: len B, on the policy's device.
        draws: Seeds and size of the images.
        sampling: The steps, and where noise is injected.
    """
    height = draws.height
    width = draws.width
    noise_level = float(sampling.noise_level)
    noise_indices = list(sampling.noise_steps) if noise_level != 0 else []
    sigmas = policy.sigmas(sampling.num_steps, height, width)
    x = policy.initial_latents(draws.initial_seeds or draws.seeds, height, width)
    record = Rollout(
        item_ids=torch.as_tensor(draws.item_ids, dtype=torch.int64),
        seeds=torch.as_tensor(list(draws.seeds), dtype=torch.int64),
        clean_latents=x,  # noise, until the last line
        conditioning=conditioning,
        noise_steps=[],
        sigmas=sigmas,
        height=height,
        width=width,
        noise_level=noise_level,
        transition=sampling.transition,
    )
    # Around all forwards, so that the LoRA's weights are cast once for all of them.
    with policy.autocast():
        # From noise to the first noise step, or to the image where there is none.
        first_index = noise_indices[0] if noise_indices else sampling.num_steps
        part = sigmas[: first_index + 1]
        if draws.initial_seeds is None:
            x = _denoise(policy, record, x, part, sampling)
        else:  # samples of one initial seed are computed once
            seeds = list(draws.initial_seeds)
            distinct = list(dict.fromkeys(seeds))
            owners = record.select([seeds.index(seed) for seed in distinct])
            x = _denoise(policy, owners, owners.clean_latents, part, sampling)
            x = x[to_device(torch.tensor([distinct.index(seed) for seed in seeds]), x.device)]
        # A step with noise, which is recorded, and then those without, up to the next one.
        next_indices = [*noise_indices, sampling.num_steps][1:]
        for index, next_index in zip(noise_indices, next_indices, strict=True):
            step = transition(policy, record, x, index)
            next_x = step.sample(step_noise(draws.seeds, index, x))
            log_prob = step.log_prob(next_x)
            record.noise_steps.append(NoiseStep(index, x, next_x, step.mean, log_prob))
            part = sigmas[index + 1 : next_index + 1]
            in_tail = next_index == sampling.num_steps and sampling.tail_steps is not None
            if in_tail:
                part = sampling.tail(part)
            x = _denoise(policy, record, next_x, part, sampling, second_order=in_tail)
    record.clean_latents = x
    return record


def _denoise(
    policy: Policy,
    record: Rollout,
    latents: torch.Tensor,
    sigmas: torch.Tensor,
    sampling: Sampling,
    second_order: bool = False,
) -> torch.Tensor:
    """Steps without noise from the first to the last of ``sigmas``; there may be none."""
    if len(sigmas) == 1:
        return latents

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return policy.velocity(x, sigma, record.conditioning, record.height, record.width)

    weights = merged(policy) if sampling.merge_lora else nullcontext()
    with weights, policy.keeping_prefix():
        return integrate(velocity, latents, sigmas, second_order)


def transition(policy: Policy, rollout: Rollout, latents: torch.Tensor, index: int) -> Transition:
    """Distribution of x' after step ``index`` of the schedule under the current weights.

    Rollout and training both call it, which is why the first ratio is 1.

    Args:
        policy: With the weights in question.
        rollout: Conditioning, schedule and noise level of the B samples.
        latents: (B, L, C) float32, x_t before the step.
        index: Position in ``rollout.sigmas``.
    """
    sigma, sigma_next = _sigma_pair(rollout.sigmas, index, latents)
    velocity = policy.velocity(latents, sigma, rollout.conditioning, rollout.height, rollout.width)
    take_step = find_transition(rollout.transition)
    sigma_first = float(rollout.sigmas[1])
    return take_step(latents, velocity, sigma, sigma_next, sigma_first, rollout.noise_level)


def with_current_log_probs(policy: Policy, rollout: Rollout, as_trained: bool = False) -> Rollout:
    """The rollout with ``mean`` and ``log_prob`` of its noise steps under the current weights.

    ``as_trained``: with gradients enabled, because compiled blocks have one graph with and another
    without them.
    """
    steps = []
    for step in rollout.noise_steps:
        with torch.set_grad_enabled(as_trained):
            current = transition(policy, rollout, step.latents, step.index)
        mean = current.mean.detach()
        log_prob = dataclasses.replace(current, mean=mean).log_prob(step.next_latents)
        steps.append(dataclasses.replace(step, mean=mean, log_prob=log_prob))
    return dataclasses.replace(rollout, noise_steps=steps)


def step_noise(seeds: Sequence[int] | torch.Tensor, step: int, like: torch.Tensor) -> torch.Tensor:
    """Standard normal noise in float32, with the shape (B, ...) and device of ``like``.

    Row b depends on (seeds[b], step) alone.
    """
    # NumPy's SeedSequence, because torch's CPU generator uses only 32 bits of a seed.
    shape = tuple(like.shape[1:])
    rows = []
    for seed in seeds:
        generator = np.random.default_rng([int(seed), step])
        rows.append(generator.standard_normal(shape, dtype=np.float32))
    return to_device(torch.from_numpy(np.stack(rows)), like.device)


def integrate(
    velocity: Velocity,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    second_order: bool = False,
) -> torch.Tensor:
    """dx/dσ = v(x (B, L, C), σ (B,)) from the first to the last of ``sigmas``, by Euler steps.

    In second order, they extrapolate the velocity to the middle of the step from its last two
    values (Adams-Bashforth with variable step lengths: Hairer, Nørsett, Wanner, Solving Ordinary
    Differential Equations I, III.5) after the first one.
    """
    last: tuple[torch.Tensor, float] | None = None
    for i in range(len(sigmas) - 1):
        sigma, sigma_next = _sigma_pair(sigmas, i, x)
        v = velocity(x, sigma)
        step = float(sigmas[i + 1] - sigmas[i])
        slope = v
        if last is not None:
            last_v, last_step = last
            slope = v + step / (2 * last_step) * (v - last_v)
        if second_order:
            last = v, step
        x = euler_step(x, slope, sigma, sigma_next)
    return x


def _sigma_pair(
    sigmas: torch.Tensor, step: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """σ at ``step`` and at the next one, (B,) each, on the device of ``like`` (B, ...)."""
    pair = to_device(sigmas[step : step + 2], like.device)
    return pair[0].expand(like.shape[0]), pair[1].expand(like.shape[0])


# --- one step -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transition:
    """Distribution of x' given x_t: normal, with independent components."""

    mean: torch.Tensor  # (B, L, C) float32, μ
    std: torch.Tensor  # (B,) float32, standard deviation of x' around the mean, ≥ 0
    s: torch.Tensor  # (B,) float32, the s of docs/method.md §4 (the KL term divides by 2s²)

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """x' = mean + std·ε for standard normal ``noise`` (B, L, C) float32."""
        return self.mean + _expand(self.std, self.mean) * noise

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """log N(x'; mean, std²) (B,) of ``next_latents`` (B, L, C).

        Averaged over tokens and channels.
        """
        square = self._square(next_latents)
        return -square / (2 * self.std.square()) - self.std.log() - _LOG_SQRT_2PI

    def _square(self, next_latents: torch.Tensor) -> torch.Tensor:
        return (next_latents - self.mean).square().flatten(1).mean(1)


class CpsTransition(Transition):
    """Its log-probability has no normalizer (arXiv 2509.05952)."""

    @override
    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """−(x' − mean)² (B,) of ``next_latents`` (B, L, C), averaged over tokens and channels."""
        return -self._square(next_latents)


# (x_t (B, L, C), v (B, L, C), σ_i (B,), σ_{i+1} (B,), σ_1, noise level a) → distribution of x'
TransitionFn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float], Transition
]


def sde_step(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """Flow-SDE step (Flow-GRPO, arXiv 2505.05470, eq. 9): s = a·sqrt(σ_i / (1 − σ̃)).

    σ̃ = σ_i, but σ_1 where σ_i is exactly 1.
    """
    sigma_tilde = torch.where(sigma == 1, sigma_first, sigma)
    s = noise_level * (sigma / (1 - sigma_tilde)).sqrt()
    return general_sde_step(latents, velocity, sigma, sigma_next, s)


def dance_step(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """DanceGRPO's step (arXiv 2505.07818): s = a at each σ; ``sigma_first`` is not needed."""
    del sigma_first
    s = torch.full_like(sigma, noise_level)
    return general_sde_step(latents, velocity, sigma, sigma_next, s)


def general_sde_step(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    s: torch.Tensor,
) -> Transition:
    """A step of the SDE with noise s (B,) float32, whose marginals are those of the ODE.

    mean = x·(1 + s²/(2σ_i)·dt) + v·(1 + s²(1−σ_i)/(2σ_i))·dt;  std = s·sqrt(−dt)
    """
    dt = sigma_next - sigma
    half = s.square() / (2 * sigma)
    latents_factor = _expand(1 + half * dt, latents)
    velocity_factor = _expand((1 + half * (1 - sigma)) * dt, latents)
    mean = latents * latents_factor + velocity * velocity_factor
    return Transition(mean=mean, std=s * (-dt).sqrt(), s=s)


def cps_step(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """Flow-CPS step (coefficients-preserving sampling, arXiv 2509.05952).

    Some of the noise is replaced, and none is added.

        s = σ_{i+1}·sin(a·π/2);  x̂0 = x − σ_i v;  x̂1 = x + (1−σ_i) v
        mean = (1−σ_{i+1})·x̂0 + sqrt(σ_{i+1}² − s²)·x̂1;  std = s

    ``sigma_first`` is not needed; ``noise_level`` is in [0, 1].
    """
    del sigma_first
    s = sigma_next * math.sin(noise_level * math.pi / 2)
    clean = latents - _expand(sigma, latents) * velocity
    noise = latents + _expand(1 - sigma, latents) * velocity
    # At a = 1 rounding can make the difference slightly negative.
    keep = (sigma_next.square() - s.square()).clamp_min(0).sqrt()
    mean = _expand(1 - sigma_next, latents) * clean + _expand(keep, latents) * noise
    return CpsTransition(mean=mean, std=s, s=s)


# ``sample.transition`` → a noise step.
TRANSITIONS: dict[str, TransitionFn] = {
    "flow_sde": sde_step,
    "cps": cps_step,
    "dance_sde": dance_step,
}


@functools.cache
def find_transition(name: str) -> TransitionFn:
    """The noise step that ``TRANSITIONS`` calls ``name``, or ``package.module:function``.

    Raises:
        ValueError: There is none of this name, or it cannot be imported.
    """
    return TRANSITIONS.get(name) or find_function(name, list(TRANSITIONS))


def transition_problem(
    name: str, num_steps: int, noise_steps: Sequence[int], noise_level: float
) -> str | None:
    """Why the transition ``name`` cannot be trained at one of ``noise_steps``.

    It is tried on small latents and an even schedule of ``num_steps``.
    """
    try:
        take_step = find_transition(name)
    except ValueError as error:
        return str(error)
    sigmas = torch.linspace(1, 0, num_steps + 1)
    latents = torch.ones(2, 3, 4)
    for index in noise_steps:
        sigma, sigma_next = _sigma_pair(sigmas, index, latents)
        step = take_step(latents, latents, sigma, sigma_next, float(sigmas[1]), noise_level)
        shapes = [tuple(tensor.shape) for tensor in (step.mean, step.std, step.s)]
        if shapes != [(2, 3, 4), (2,), (2,)]:
            return (
                f"{name!r} returns mean, std and s of the shapes {shapes} for two samples of the "
                "shape (3, 4): they must be (2, 3, 4), (2,) and (2,)"
            )
        if not (step.std > 0).all():
            return (
                f"{name!r} has a standard deviation of {float(step.std[0]):g} at step {index} with "
                f"sample.noise_level={noise_level:g}, which must be above 0: leave this step out "
                "of sample.noise_steps"
            )
    return None


def euler_step(
    latents: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
) -> torch.Tensor:
    """Deterministic step x + v·dt, as diffusers' FlowMatchEulerDiscreteScheduler."""
    return latents + _expand(sigma_next - sigma, latents) * velocity


def _expand(per_sample: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return per_sample.view(-1, *[1] * (like.ndim - 1))
