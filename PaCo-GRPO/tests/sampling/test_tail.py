"""Steps after the last noise step: fewer, of second order, from a cache; what was recorded before them never changes."""

import numpy as np
import pytest
import torch
from tiny_policies import NAMES, disturb, items, load
from toy_policy import ToyPolicy

from paco_grpo.policies.lora import add_lora
from paco_grpo.sampling.denoise import Tail, integrate, rollout
from paco_grpo.types import Item

MEAN, STD = 1.5, 0.4  # of a gaussian that a flow turns noise into


def velocity(x, sigma):
    """E[noise − x_0 | x_σ = x] for x_0 ~ N(MEAN, STD²), x_σ = (1 − σ)·x_0 + σ·noise: the flow that training finds."""
    variance = (1 - sigma) ** 2 * STD**2 + sigma**2
    return (sigma - (1 - sigma) * STD**2) / variance * (x - (1 - sigma) * MEAN) - MEAN


def test_order_two_against_numpy():
    """Two steps by hand, of unequal length."""
    sigmas, x = np.array([0.9, 0.5, 0.0]), 0.7
    first = x + velocity(x, 0.9) * -0.4
    middle = velocity(first, 0.5) + (-0.5 / (2 * -0.4)) * (velocity(first, 0.5) - velocity(x, 0.9))
    expected = first + middle * -0.5
    of = integrate(
        lambda x, s: velocity(x, s.view(-1, 1, 1)),
        torch.full((1, 1, 1), x, dtype=torch.float64),
        torch.tensor(sigmas),
        2,
    )
    np.testing.assert_allclose(of.item(), expected, rtol=1e-12)


@pytest.mark.parametrize("steps", [None, 1, 2, 3, 7, 8, 20])
def test_fewer_steps_keep_the_ends(steps):
    sigmas = torch.linspace(0.9, 0, 9)
    chosen = Tail(steps).sigmas(sigmas)
    assert len(chosen) == (9 if steps is None else min(9, steps + 1))
    assert chosen[0] == sigmas[0] and chosen[-1] == 0
    assert (chosen.diff() < 0).all() and np.isin(chosen, sigmas).all()


def toy(tail, **options):
    policy = ToyPolicy()
    conditioning = policy.encode([Item(i, str(i)) for i in (0, 1)])
    record = rollout(
        policy, conditioning, [0, 1], [5, 6], 8, 8,
        **{"num_steps": 10, "noise_steps": (1, 3), "noise_level": 0.7, "tail": tail} | options,
    )  # fmt: skip
    return policy.calls, record


def assert_same_noise_steps(one, two):
    assert len(one.noise_steps) == len(two.noise_steps) > 0
    for a, b in zip(one.noise_steps, two.noise_steps, strict=True):
        for name in ("latents", "next_latents", "mean", "log_prob"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("tail", [Tail(2), Tail(order=2), Tail(3, 2)])
def test_only_what_follows_the_last_noise_step_changes(tail):
    calls, plain = toy(Tail())
    fewer, changed = toy(tail)
    assert len(calls) == 10 and len(fewer) == 4 + min(tail.steps or 6, 6)
    assert_same_noise_steps(plain, changed)
    assert not torch.equal(plain.clean_latents, changed.clean_latents)
    torch.testing.assert_close(plain.clean_latents, changed.clean_latents, atol=0.3, rtol=0.3)


def test_without_noise_there_is_no_tail():
    _, plain = toy(Tail(), noise_steps=())
    calls, same = toy(Tail(2, 2), noise_steps=())
    assert len(calls) == 10 and torch.equal(plain.clean_latents, same.clean_latents)


@pytest.mark.parametrize("name", NAMES)
def test_first_block_cache_skips_blocks_in_the_tail_alone(tiny_folder, name):
    policy = load(name, tiny_folder(name))
    add_lora(policy, 4, 8)
    disturb(policy)
    conditioning = policy.encode(items(name, "a", "b"))
    blocks = policy.transformer.transformer_blocks
    computed = []
    for number in (0, 1):
        blocks[number].attn.register_forward_hook(lambda *_, n=number: computed.append(n))

    def sample(threshold):
        computed.clear()
        options = {"num_steps": 6, "noise_steps": (1,), "noise_level": 0.7, "tail": Tail(cache=threshold)}
        return rollout(policy, conditioning, [0, 1], [5, 6], 32, 32, **options)

    plain = sample(0.0)
    passes = 2 if name == "qwen_image_edit" else 1  # true CFG
    assert computed.count(0) == computed.count(1) == 6 * passes
    again, strict = sample(1e9), None
    # of the tail's four steps the first computes everything, whatever the rollout before left behind
    assert (computed.count(0), computed.count(1)) == (6 * passes, 3 * passes)
    assert_same_noise_steps(plain, again)
    assert not torch.equal(plain.clean_latents, again.clean_latents)
    assert torch.equal(sample(1e9).clean_latents, again.clean_latents)
    strict = sample(1e-9)
    assert computed.count(1) == 6 * passes
    torch.testing.assert_close(strict.clean_latents, plain.clean_latents, rtol=1e-5, atol=1e-6)
    assert torch.equal(sample(0.0).clean_latents, plain.clean_latents)
