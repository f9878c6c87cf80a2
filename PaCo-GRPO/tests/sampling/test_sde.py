"""The steps against NumPy in float64 and against torch.distributions.Normal (arXiv 2505.05470,
2509.05952).
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_policy import numpy_step

from paco_grpo.sampling.sde import cps_step, sde_step


def random_step(seed, batch=3, tokens=5, channels=4):
    rng = np.random.default_rng(seed)
    x, v, noise = rng.standard_normal((3, batch, tokens, channels))
    sigma = np.sort(rng.uniform(0.05, 0.999, batch))
    return x, v, noise, sigma, sigma * rng.uniform(0, 0.95, batch)


def tensors(*arrays):
    return [torch.tensor(a, dtype=torch.float32) for a in arrays]


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(0.05, 1.0), st.sampled_from(["sde", "first", "cps"]))
def test_steps_against_numpy(seed, a, kind):
    x, v, noise, sigma, sigma_next = random_step(seed)
    if kind == "first":  # the first step of a schedule, where σ is exactly 1
        sigma, sigma_next = np.ones(3), np.full(3, 0.9)
    step = (cps_step if kind == "cps" else sde_step)(*tensors(x, v, sigma, sigma_next), 0.9, a)
    next_latents = step.sample(*tensors(noise))
    assert step.mean.dtype == next_latents.dtype == torch.float32
    for b in range(3):
        mean, s, std = numpy_step(x[b], v[b], sigma[b], sigma_next[b], 0.9, a, kind == "cps")
        log_prob = (
            -((std * noise[b]) ** 2)
            if kind == "cps"
            else -(noise[b] ** 2) / 2 - np.log(std) - np.log(2 * np.pi) / 2
        )
        np.testing.assert_allclose(step.mean[b], mean, rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(step.s[b], s, rtol=2e-4)
        np.testing.assert_allclose(next_latents[b], mean + std * noise[b], rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(
            step.log_prob(next_latents)[b], log_prob.mean(), rtol=2e-3, atol=2e-3
        )
    if kind != "cps":
        normal = torch.distributions.Normal(step.mean, step.std.view(-1, 1, 1).expand_as(step.mean))
        expected = normal.log_prob(next_latents).mean((1, 2))
        torch.testing.assert_close(step.log_prob(next_latents), expected, rtol=1e-4, atol=1e-4)


def test_flow_sde_keeps_the_marginal_distribution():
    """With the exact velocity of Gaussian data N(m, 0), an SDE step maps the marginal at σ_i to
    that at σ_{i+1}.
    """
    generator = torch.Generator().manual_seed(0)
    data = 0.5
    sigma, sigma_next = torch.tensor([0.6]), torch.tensor([0.58])
    noise = torch.randn(1, 200_000, 1, generator=generator)
    x = (1 - sigma) * data + sigma * noise
    velocity = (x - data) / sigma  # noise − x_0
    step = sde_step(x, velocity, sigma, sigma_next, 0.9, 0.7)
    after = step.sample(torch.randn(x.shape, generator=generator))
    assert abs(after.mean() - (1 - 0.58) * data) < 0.005
    assert abs(after.std() - 0.58) < 0.01
