"""The steps against NumPy in float64 and against torch.distributions.Normal (arXiv 2505.05470, 2509.05952)."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paco_grpo.sampling.sde import cps_step, euler_step, sde_step

level = st.floats(0.05, 1.0)


def random_step(seed, batch=3, tokens=5, channels=4):
    rng = np.random.default_rng(seed)
    x, v, noise = rng.standard_normal((3, batch, tokens, channels))
    sigma = np.sort(rng.uniform(0.05, 0.999, batch))
    sigma_next = sigma * rng.uniform(0, 0.95, batch)
    return x, v, noise, sigma, sigma_next


def tensors(*arrays):
    return [torch.tensor(a, dtype=torch.float32) for a in arrays]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), level, st.booleans())
def test_flow_sde(seed, a, start):
    x, v, noise, sigma, sigma_next = random_step(seed)
    sigma_first = 0.9
    if start:  # the first step of a schedule, where σ is exactly 1
        sigma, sigma_next = np.ones(3), np.full(3, sigma_first)
    step = sde_step(*tensors(x, v, sigma, sigma_next), sigma_first, a)
    next_latents = step.sample(*tensors(noise))
    assert step.mean.dtype == next_latents.dtype == torch.float32

    for b in range(3):
        dt = sigma_next[b] - sigma[b]
        tilde = sigma_first if sigma[b] == 1 else sigma[b]
        s = a * np.sqrt(sigma[b] / (1 - tilde))
        mean = x[b] * (1 + s**2 / (2 * sigma[b]) * dt) + v[b] * (1 + s**2 * (1 - sigma[b]) / (2 * sigma[b])) * dt
        std = s * np.sqrt(-dt)
        np.testing.assert_allclose(step.mean[b], mean, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(step.s[b], s, rtol=2e-4)
        np.testing.assert_allclose(step.std[b], std, rtol=2e-4)
        np.testing.assert_allclose(next_latents[b], mean + std * noise[b], rtol=2e-3, atol=2e-4)
        log_density = -(noise[b] ** 2) / 2 - np.log(std) - np.log(2 * np.pi) / 2
        np.testing.assert_allclose(step.log_prob(next_latents)[b], log_density.mean(), rtol=2e-3, atol=2e-3)

    normal = torch.distributions.Normal(step.mean, step.std.view(-1, 1, 1).expand_as(step.mean))
    torch.testing.assert_close(
        step.log_prob(next_latents), normal.log_prob(next_latents).mean((1, 2)), rtol=1e-4, atol=1e-4
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), level)
def test_flow_cps(seed, a):
    x, v, noise, sigma, sigma_next = random_step(seed)
    step = cps_step(*tensors(x, v, sigma, sigma_next), 0.9, a)
    next_latents = step.sample(*tensors(noise))
    for b in range(3):
        s = sigma_next[b] * np.sin(a * np.pi / 2)
        x0, x1 = x[b] - sigma[b] * v[b], x[b] + (1 - sigma[b]) * v[b]
        mean = (1 - sigma_next[b]) * x0 + np.sqrt(max(sigma_next[b] ** 2 - s**2, 0)) * x1
        np.testing.assert_allclose(step.mean[b], mean, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(next_latents[b], mean + s * noise[b], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(step.log_prob(next_latents)[b], -((s * noise[b]) ** 2).mean(), rtol=1e-3, atol=1e-5)
    assert torch.isfinite(step.mean).all()


def test_a_small_noise_level_is_nearly_the_euler_step():
    x, v, _, sigma, sigma_next = (torch.tensor(a, dtype=torch.float32) for a in random_step(0))
    euler = euler_step(x, v, sigma, sigma_next)
    for function in (sde_step, cps_step):
        torch.testing.assert_close(function(x, v, sigma, sigma_next, 0.9, 1e-5).mean, euler, rtol=1e-4, atol=1e-5)


def test_flow_sde_keeps_the_marginal_distribution():
    """With the exact velocity of Gaussian data N(m, 0), an SDE step maps the marginal at σ_i to that at σ_{i+1}."""
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
