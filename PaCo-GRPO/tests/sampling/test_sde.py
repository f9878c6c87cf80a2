"""Log-probabilities of the steps against torch.distributions.Normal (arXiv 2505.05470, 2509.05952)."""

import pytest
import torch

from paco_grpo.sampling.sde import cps_step, sde_step


@pytest.mark.parametrize(("step", "sigma"), [(sde_step, 0.6), (sde_step, 1.0), (cps_step, 0.6)])
def test_log_prob(step, sigma):
    """Mean and standard deviation: test_rollout.py."""
    x, v, noise = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    sigmas = torch.tensor([sigma, 0.8]), torch.tensor([0.5, 0.1])
    taken = step(x, v, *sigmas, 0.9, 0.7)
    latents = taken.sample(noise)
    normal = torch.distributions.Normal(taken.mean, taken.std.view(-1, 1, 1).expand_as(x))
    expected = normal.log_prob(latents)
    if step is cps_step:
        expected = -(latents - taken.mean).square()
    torch.testing.assert_close(taken.log_prob(latents), expected.mean((1, 2)), rtol=1e-4, atol=1e-4)
