"""What the rollout records, what it costs, and that training recomputes it exactly."""

import re

import numpy as np
import pytest
import torch
from toy_policy import ToyPolicy, numpy_step

from paco_grpo.sampling.denoise import (
    CpsTransition,
    Draws,
    Sampling,
    Transition,
    cps_step,
    dance_step,
    integrate,
    rollout,
    sde_step,
    transition_problem,
)
from paco_grpo.types import Item


def toy_rollout(policy, ids=(0, 0, 1, 1), seeds=(10, 11, 12, 13), shared=None, **kwargs):
    conditioning = policy.encode([Item(i, str(i)) for i in ids])
    options = {"num_steps": 5, "noise_steps": (1, 3), "noise_level": 0.7} | kwargs
    draws = Draws(ids, seeds, 8, 12, shared)
    return rollout(policy, conditioning, draws, Sampling(**options))


def numpy_rollout(policy, direction, seed, noise_steps, a, kind):
    """docs/method.md §4 for one sample in float64."""
    p = policy.transformer.current.detach().double().numpy()
    x = policy.initial_latents([seed], 8, 12)[0].double().numpy()
    sigmas = policy.sigmas(5, 8, 12).double().numpy()
    for i in range(5):
        sigma, following = sigmas[i], sigmas[i + 1]
        v = p[0] * x + p[1] * sigma * direction
        if i not in noise_steps:
            x = x + v * (following - sigma)
            continue
        noise = np.random.default_rng([seed, i]).standard_normal(x.shape, dtype=np.float32)
        mean, _, std = numpy_step(x, v, sigma, following, sigmas[1], a, kind)
        x = mean + std * noise
    return x


@pytest.mark.parametrize("kind", ["flow_sde", "cps", "dance_sde"])
@pytest.mark.parametrize("noise_steps", [(), (0,), (1, 3), (4,)])
def test_against_numpy(kind, noise_steps):
    policy = ToyPolicy()
    seeds = (10, 10 + 2**32, 12, 13)  # the first two agree in their low 32 bits
    record = toy_rollout(policy, seeds=seeds, noise_steps=noise_steps, transition=kind)
    assert [step.index for step in record.noise_steps] == list(noise_steps)
    assert record.clean_latents.dtype == torch.float32
    for b, seed in enumerate(seeds):
        direction = record.conditioning.direction[b].double().numpy()
        expected = numpy_rollout(policy, direction, seed, noise_steps, 0.7, kind)
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


@pytest.mark.parametrize(
    ("step", "sigma"),
    [(sde_step, 0.6), (sde_step, 1.0), (dance_step, 1.0), (cps_step, 0.6)],
)
def test_log_prob(step, sigma):
    x, v, noise = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    sigmas = torch.tensor([sigma, 0.8]), torch.tensor([0.5, 0.1])
    taken = step(x, v, *sigmas, 0.9, 0.7)
    latents = taken.sample(noise)
    normal = torch.distributions.Normal(taken.mean, taken.std.view(-1, 1, 1).expand_as(x))
    expected = normal.log_prob(latents)
    if step is cps_step:
        expected = -(latents - taken.mean).square()
    torch.testing.assert_close(taken.log_prob(latents), expected.mean((1, 2)), rtol=1e-4, atol=1e-4)


def one_std(x, v, sigma, sigma_next, sigma_first, a):
    return Transition(x, torch.tensor(a), sigma)


def negative(x, v, sigma, sigma_next, sigma_first, a):
    return CpsTransition(x, 0.55 - sigma, sigma)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_std", r"shapes \[\(2, 3, 4\), \(\), \(2,\)\]"),
        ("negative", r"standard deviation of -0.05 at step 2"),
        ("missing", "cannot be imported"),
    ],
)
def test_a_transition_that_cannot_be_trained_is_named(name, words):
    problem = transition_problem(f"{__name__}:{name}", 5, (3, 2), 0.7)
    assert re.search(words, problem)


# --- steps after the last noise step: fewer, and of second order


def test_order_two_against_numpy():
    """Two steps by hand, of unequal length."""

    def velocity(x, sigma):
        return x**2 - sigma * x + sigma**2

    sigmas, x = np.array([0.9, 0.5, 0.0]), 0.7
    first = x + velocity(x, 0.9) * -0.4
    middle = velocity(first, 0.5) + (-0.5 / (2 * -0.4)) * (velocity(first, 0.5) - velocity(x, 0.9))
    start = torch.full((1, 1, 1), x, dtype=torch.float64)
    found = integrate(
        lambda x, s: velocity(x, s.view(-1, 1, 1)), start, torch.tensor(sigmas), second_order=True
    )
    np.testing.assert_allclose(found.item(), first + middle * -0.5, rtol=1e-12)


@pytest.mark.parametrize(
    ("steps", "places"),
    [(None, range(9)), (1, [0, 8]), (3, [0, 3, 5, 8]), (8, range(9)), (20, range(9))],
)
def test_fewer_steps_are_evenly_spaced_and_keep_the_ends(steps, places):
    sigmas = torch.linspace(0.9, 0, 9)
    assert torch.equal(Sampling(10, tail_steps=steps).tail(sigmas), sigmas[list(places)])


@pytest.mark.parametrize("tail", [{"tail_steps": 2}, {"tail_steps": 6}])
def test_only_what_follows_the_last_noise_step_changes(tail):
    whole, shorter = ToyPolicy(), ToyPolicy()
    plain = toy_rollout(whole, num_steps=10)
    changed = toy_rollout(shorter, num_steps=10, **tail)
    assert len(whole.calls) == 10 and len(shorter.calls) == 4 + tail["tail_steps"]
    assert len(plain.noise_steps) == 2
    for a, b in zip(plain.noise_steps, changed.noise_steps, strict=True):
        for name in ("latents", "next_latents", "mean", "log_prob"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert not torch.equal(plain.clean_latents, changed.clean_latents)
    torch.testing.assert_close(plain.clean_latents, changed.clean_latents, atol=0.3, rtol=0.3)


def test_without_noise_there_is_no_tail_and_nothing_is_recorded():
    policy = ToyPolicy()
    plain = toy_rollout(ToyPolicy(), noise_steps=())
    same = toy_rollout(policy, noise_level=0.0, tail_steps=2)
    assert len(policy.calls) == 5 and same.noise_steps == []
    assert torch.equal(plain.clean_latents, same.clean_latents)
