"""What the rollout records, what it costs, and that training recomputes it exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import ToyPolicy, numpy_step

from paco_grpo.sampling.denoise import Draws, Sampling, rollout, sample_noise_steps
from paco_grpo.types import Item


def toy_rollout(policy, ids=(0, 0, 1, 1), seeds=(10, 11, 12, 13), shared=None, **kwargs):
    conditioning = policy.encode([Item(i, str(i)) for i in ids])
    options = {"num_steps": 5, "noise_steps": (1, 3), "noise_level": 0.7} | kwargs
    draws = Draws(ids, seeds, 8, 12, shared)
    return rollout(policy, conditioning, draws, Sampling(**options))


def numpy_rollout(policy, direction, seed, noise_steps, a, cps, steps=5):
    """docs/method.md §4 for one sample in float64."""
    p = policy.transformer.current.detach().double().numpy()
    x = policy.initial_latents([seed], 8, 12)[0].double().numpy()
    sigmas = policy.sigmas(steps, 8, 12).double().numpy()
    for i in range(steps):
        sigma, following = sigmas[i], sigmas[i + 1]
        v = p[0] * x + p[1] * sigma * direction
        if i not in noise_steps:
            x = x + v * (following - sigma)
            continue
        noise = np.random.default_rng([seed, i]).standard_normal(x.shape, dtype=np.float32)
        mean, _, std = numpy_step(x, v, sigma, following, sigmas[1], a, cps)
        x = mean + std * noise
    return x


@pytest.mark.parametrize("cps", [False, True])
@pytest.mark.parametrize("noise_steps", [(), (0,), (1, 3), (4,)])
def test_against_numpy(cps, noise_steps):
    policy = ToyPolicy()
    seeds = (10, 10 + 2**32, 12, 13)  # the first two agree in their low 32 bits
    record = toy_rollout(policy, seeds=seeds, noise_steps=noise_steps, cps=cps)
    assert [step.index for step in record.noise_steps] == list(noise_steps)
    assert record.clean_latents.dtype == torch.float32
    for b, seed in enumerate(seeds):
        direction = record.conditioning.direction[b].double().numpy()
        expected = numpy_rollout(policy, direction, seed, noise_steps, 0.7, cps)
        np.testing.assert_allclose(record.clean_latents[b].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_same_latent_shares_the_steps_before_the_first_noise_step():
    policy = ToyPolicy()
    shared = toy_rollout(policy, shared=(10, 10, 12, 12), noise_steps=(2,))
    assert policy.calls == [2, 2, 4, 4, 4]
    (step,) = shared.noise_steps
    for row, seed in ((0, 10), (2, 12)):  # as a sample alone with that seed
        (plain,) = toy_rollout(policy, ids=(row // 2,), seeds=(seed,), noise_steps=(2,)).noise_steps
        torch.testing.assert_close(step.latents[row : row + 1], plain.latents, rtol=0, atol=1e-6)
    assert torch.equal(step.latents[0], step.latents[1])
    assert not torch.equal(step.next_latents[0], step.next_latents[1])
    # interleaved groups, and a group spread over two calls
    mixed = toy_rollout(
        policy, ids=(0, 1, 0, 1), seeds=(10, 12, 11, 13), shared=(10, 12, 10, 12), noise_steps=(2,)
    )
    torch.testing.assert_close(
        mixed.clean_latents[[0, 2, 1, 3]], shared.clean_latents, rtol=0, atol=1e-6
    )
    second = toy_rollout(policy, ids=(0,), seeds=(11,), shared=(10,), noise_steps=(2,))
    torch.testing.assert_close(second.clean_latents, shared.clean_latents[1:2], rtol=0, atol=1e-6)


@given(
    st.sets(st.integers(0, 30), min_size=1), st.integers(0, 2**40), st.integers(0, 1000), st.data()
)
def test_drawn_noise_steps_are_candidates_and_reproducible(candidates, seed, epoch, data):
    number = data.draw(st.integers(1, len(candidates)))
    chosen = sample_noise_steps(sorted(candidates), number, seed, epoch)
    assert (
        len(chosen) == number == len(set(chosen))
        and set(chosen) <= candidates
        and list(chosen) == sorted(chosen)
    )
    assert chosen == sample_noise_steps(sorted(candidates, reverse=True), number, seed, epoch)
    assert sample_noise_steps(candidates, None, seed, epoch) == tuple(sorted(candidates))
    assert len({sample_noise_steps(range(10), 2, seed, epoch + i) for i in range(50)}) > 20
