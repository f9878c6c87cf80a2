"""Denoise a batch, recording what training needs; and recompute it under the present weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from paco_grpo.policies.base import Policy
from paco_grpo.sampling.schedule import check_noise_steps
from paco_grpo.sampling.sde import Transition, cps_step, sde_step
from paco_grpo.sampling.tail import Tail, integrate
from paco_grpo.transfer import to_device
from paco_grpo.types import Conditioning, RolloutRecord


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
    noise_steps: Sequence[int],
    noise_level: float,
    cps: bool = False,
    group_index: torch.Tensor | None = None,
    initial_seeds: Sequence[int] | None = None,
    merge_lora: bool = False,
    tail: Tail = Tail(),  # noqa: B008 - it is frozen
) -> RolloutRecord:
    """Sample B images' latents (method §4): Euler steps, with noise injected at ``noise_steps`` only.

    Args:
        policy: The generator with the weights to sample from.
        conditioning: len B, on the policy's device.
        item_ids: (B,), goes into the record.
        seeds: B integers ≥ 0; the noise of sample b at step i depends on (seeds[b], i) alone, never on the batch.
        height: Pixels, a multiple of the policy's ``size_multiple``.
        width: Pixels, a multiple of the policy's ``size_multiple``.
        num_steps: T.
        noise_steps: Step indices that are noisy; () = plain deterministic sampling (evaluation).
        noise_level: a; at 0 no step is noisy and none is recorded.
        cps: Flow-CPS in place of Flow-SDE.
        group_index: (B,) int64 for ``same_latent``: samples with equal index (same item) share the initial noise, and
            the steps before the first noise step are computed once for each distinct index.
        initial_seeds: B seeds of the initial noise; default ``seeds``. With ``group_index``, each group uses the value
            of its first member here: give equal values within a group that is spread over batches or processes.
        merge_lora: Noiseless steps run with the LoRA merged into the base weights: faster, equal to rounding. The noise
            steps never do, so that their log-probabilities are the ones that training computes.
        tail: How the steps after the last noise step are done; without noise there is no tail.

    Raises:
        ValueError: Sizes disagree, or a noise step lies outside the schedule.
    """
    steps = check_noise_steps(noise_steps, num_steps) if noise_level != 0 else ()
    batch = len(conditioning)
    initial_seeds = list(seeds if initial_seeds is None else initial_seeds)
    _check_batch(batch, item_ids=item_ids, seeds=seeds, initial_seeds=initial_seeds)
    sigmas = policy.sigmas(num_steps, height, width)
    first_noise_step = steps[0] if steps else num_steps

    denoise = partial(_noiseless, policy, height=height, width=width, merge_lora=merge_lora)
    if group_index is None:
        x = policy.initial_latents(initial_seeds, height, width)
        x = denoise(x, conditioning, sigmas[: first_noise_step + 1])
    else:
        first, inverse = _first_of_each_group(group_index, batch)
        x = policy.initial_latents([initial_seeds[b] for b in first], height, width)
        x = denoise(x, conditioning.select(first), sigmas[: first_noise_step + 1])[to_device(inverse, x.device)]

    before, after, means, log_probs = [], [], [], []
    for position, i in enumerate(steps):
        transition = transition_at(policy, x, conditioning, sigmas, i, height, width, noise_level, cps)
        before.append(x)
        x = transition.sample(step_noise(seeds, i, x))
        after.append(x)
        means.append(transition.mean)
        log_probs.append(transition.log_prob(x))
        until = (*steps, num_steps)[position + 1]
        x = denoise(x, conditioning, sigmas[i + 1 : until + 1], tail=tail if i == steps[-1] else Tail())

    return RolloutRecord(
        item_ids=torch.as_tensor(item_ids, dtype=torch.int64, device=x.device),
        latents=_stack(before, x),
        next_latents=_stack(after, x),
        step_mean=_stack(means, x),
        log_prob=torch.stack(log_probs, dim=1) if log_probs else x.new_empty(batch, 0),
        step_index=torch.tensor(steps, dtype=torch.int64),
        sigmas=sigmas,
        clean_latents=x,
        conditioning=conditioning,
        height=height,
        width=width,
        noise_level=float(noise_level),
        cps=cps,
        seeds=torch.as_tensor(list(seeds), dtype=torch.int64, device=x.device),
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
    """Distribution of x' at noise step ``step`` under the policy's present weights, for x_t ``latents`` (B, N, C).

    The one function that both the rollout and training go through, which is why the first ratio is 1.
    """
    sigma, sigma_next = _sigma_at(sigmas, step, latents)
    velocity = policy.velocity(latents, sigma, conditioning, height, width)
    step_function = cps_step if cps else sde_step
    return step_function(latents, velocity, sigma, sigma_next, float(sigmas[1]), noise_level)


def record_transition(policy: Policy, record: RolloutRecord, position: int) -> Transition:
    """Distribution of x' under the present weights at the ``position``-th recorded step of ``record`` (len B)."""
    return transition_at(
        policy,
        record.latents[:, position],
        record.conditioning,
        record.sigmas,
        int(record.step_index[position]),
        record.height,
        record.width,
        record.noise_level,
        record.cps,
    )


@torch.no_grad()
def recompute_old(policy: Policy, record: RolloutRecord) -> RolloutRecord:
    """The record with ``log_prob`` and ``step_mean`` computed anew under the present weights (old_log_prob 'recompute').

    For low precision, where another batch size or kernel in training gives other numbers than the rollout did.
    """
    means, log_probs = [], []
    for position in range(len(record.step_index)):
        transition = record_transition(policy, record, position)
        means.append(transition.mean)
        log_probs.append(transition.log_prob(record.next_latents[:, position]))
    return dataclasses.replace(
        record, step_mean=_stack(means, record.clean_latents), log_prob=torch.stack(log_probs, dim=1)
    )


def step_noise(seeds: Sequence[int] | torch.Tensor, step: int, like: torch.Tensor) -> torch.Tensor:
    """Standard normal noise with the shape (B, ...) and device of ``like``, float32; row b from (seeds[b], step) alone.

    NumPy's SeedSequence, because torch's CPU generator looks at 32 bits of a seed only.
    """
    shape = tuple(like.shape[1:])
    rows = [np.random.default_rng([int(seed), step]).standard_normal(shape, dtype=np.float32) for seed in seeds]
    return to_device(torch.from_numpy(np.stack(rows)), like.device)


def _noiseless(
    policy: Policy,
    x: torch.Tensor,
    conditioning: Conditioning,
    sigmas: torch.Tensor,
    *,
    height: int,
    width: int,
    merge_lora: bool,
    tail: Tail = Tail(),  # noqa: B008 - it is frozen
) -> torch.Tensor:
    """Deterministic steps from the first to the last of ``sigmas``."""
    sigmas = tail.sigmas(sigmas)
    with ExitStack() as stack:
        if merge_lora and len(sigmas) > 1:
            stack.enter_context(policy.merged())
        if tail.weights is not None and len(sigmas) > 1:
            stack.enter_context(policy.in_int8())
        if tail.cache > 0 and len(sigmas) > 2:
            stack.enter_context(policy.cached(tail.cache))
        return integrate(lambda x, s: policy.velocity(x, s, conditioning, height, width), x, sigmas, tail.order)


def _sigma_at(sigmas: torch.Tensor, step: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pair = to_device(sigmas[step : step + 2], like.device)
    return pair[0].expand(like.shape[0]), pair[1].expand(like.shape[0])


def _first_of_each_group(group_index: torch.Tensor, batch: int) -> tuple[list[int], torch.Tensor]:
    """Position of the first member of each group, and for each sample the row of its group among them."""
    rows: dict[int, int] = {}
    first, inverse = [], []
    for position, group in enumerate(group_index.tolist()):
        if group not in rows:
            rows[group] = len(first)
            first.append(position)
        inverse.append(rows[group])
    _check_batch(batch, group_index=inverse)
    return first, torch.tensor(inverse)


def _check_batch(batch: int, **given: Sequence[int] | torch.Tensor) -> None:
    for name, values in given.items():
        if len(values) != batch:
            raise ValueError(f"{name} has {len(values)} entries, but the conditioning has {batch} rows")


def _stack(steps: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """(B, S, N, C) of S tensors (B, N, C); also for S = 0."""
    return torch.stack(steps, dim=1) if steps else like.new_empty(like.shape[0], 0, *like.shape[1:])
