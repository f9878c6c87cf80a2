"""Steps after the last noise step: fewer, and of second order; what was recorded before them never
changes.
"""

import numpy as np
import pytest
import torch
from toy_policy import ToyPolicy

from paco_grpo.sampling.denoise import Draws, Sampling, integrate, rollout
from paco_grpo.types import Item


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


def toy(**options):
    policy = ToyPolicy()
    conditioning = policy.encode([Item(i, str(i)) for i in (0, 1)])
    sampling = Sampling(**{"num_steps": 10, "noise_steps": (1, 3), "noise_level": 0.7} | options)
    return policy.calls, rollout(policy, conditioning, Draws([0, 1], [5, 6], 8, 8), sampling)


@pytest.mark.parametrize("tail", [{"tail_steps": 2}, {"tail_steps": 6}])
def test_only_what_follows_the_last_noise_step_changes(tail):
    calls, plain = toy()
    fewer, changed = toy(**tail)
    assert len(calls) == 10 and len(fewer) == 4 + tail["tail_steps"]
    assert len(plain.noise_steps) == 2
    for a, b in zip(plain.noise_steps, changed.noise_steps, strict=True):
        for name in ("latents", "next_latents", "mean", "log_prob"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert not torch.equal(plain.clean_latents, changed.clean_latents)
    torch.testing.assert_close(plain.clean_latents, changed.clean_latents, atol=0.3, rtol=0.3)


def test_without_noise_there_is_no_tail_and_nothing_is_recorded():
    _, plain = toy(noise_steps=())
    calls, same = toy(noise_level=0.0, tail_steps=2)
    assert (
        len(calls) == 10
        and same.noise_steps == []
        and torch.equal(plain.clean_latents, same.clean_latents)
    )
