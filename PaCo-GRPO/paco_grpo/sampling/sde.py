"""One stochastic denoising step and its log-probability: Flow-SDE and Flow-CPS.

| paper                         | here                                    |
|-------------------------------|-----------------------------------------|
| x_t, x'                       | latents, next_latents (B, L, C)         |
| v                             | velocity (B, L, C)                      |
| σ_i, σ_{i+1}, dt              | sigma, sigma_next, sigma_next − sigma   |
| σ_1 (second of the schedule)  | sigma_first                             |
| a                             | noise_level                             |
| s                             | Transition.s (B,)                       |
| s·sqrt(−dt) (SDE), s (CPS)    | Transition.std (B,)                     |

Everything is float32; each sample has its own σ, and nothing is reduced over the batch.
"""

import math
from dataclasses import dataclass

import torch

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Transition:
    """Distribution of x' given x_t."""

    mean: torch.Tensor  # (B, L, C) float32, μ
    std: torch.Tensor  # (B,) float32, standard deviation of x' around the mean, ≥ 0
    s: torch.Tensor  # (B,) float32, the s of docs/method.md §4 (the KL term divides by 2s²)
    cps: bool  # how the log-probability is defined

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """x' = mean + std·ε for standard normal ``noise`` (B, L, C) float32."""
        return self.mean + _expand(self.std, self.mean) * noise

    def log_prob(self, next_latents: torch.Tensor) -> torch.Tensor:
        """Log-probability (B,) of ``next_latents`` (B, L, C), averaged over tokens and channels.

        Flow-SDE: log N(x'; mean, std²). Flow-CPS: −(x' − mean)² (arXiv 2509.05952, where the
        normalizer is dropped).
        """
        square = (next_latents - self.mean).square().flatten(1).mean(1)
        if self.cps:
            return -square
        return -square / (2 * self.std.square()) - self.std.log() - _LOG_SQRT_2PI


def sde_step(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """Flow-SDE step (Flow-GRPO, arXiv 2505.05470, eq. 9).

    s = a·sqrt(σ_i / (1 − σ̃)),  σ̃ = σ_i, but σ_1 where σ_i is exactly 1
    mean = x·(1 + s²/(2σ_i)·dt) + v·(1 + s²(1−σ_i)/(2σ_i))·dt;  std = s·sqrt(−dt)
    """
    dt = sigma_next - sigma
    sigma_tilde = torch.where(sigma == 1, sigma_first, sigma)
    s = noise_level * (sigma / (1 - sigma_tilde)).sqrt()
    half = s.square() / (2 * sigma)
    latents_factor = _expand(1 + half * dt, latents)
    velocity_factor = _expand((1 + half * (1 - sigma)) * dt, latents)
    mean = latents * latents_factor + velocity * velocity_factor
    return Transition(mean=mean, std=s * (-dt).sqrt(), s=s, cps=False)


def cps_step(
    latents: torch.Tensor,
    velocity: torch.Tensor,
    sigma: torch.Tensor,
    sigma_next: torch.Tensor,
    sigma_first: float,
    noise_level: float,
) -> Transition:
    """Flow-CPS step (coefficients-preserving sampling, arXiv 2509.05952).

    Noise is swapped for noise, never added.

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
    return Transition(mean=mean, std=s, s=s, cps=True)


def euler_step(
    latents: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
) -> torch.Tensor:
    """Deterministic step x + v·dt, as diffusers' FlowMatchEulerDiscreteScheduler."""
    return latents + _expand(sigma_next - sigma, latents) * velocity


def _expand(per_sample: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return per_sample.view(-1, *[1] * (like.ndim - 1))
