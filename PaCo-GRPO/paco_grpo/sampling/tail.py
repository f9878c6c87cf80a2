"""The deterministic end of a rollout, after its last noise step.

It enters no log-probability: an approximation there changes the images that are scored (and x_0, which DiffusionNFT
trains on), never a ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from paco_grpo.sampling.sde import euler_step
from paco_grpo.transfer import to_device


@dataclass(frozen=True)
class Tail:
    """How the steps after the last noise step are done; the default is the schedule's own Euler steps.

    Attributes:
        steps: At most so many; None = those of the schedule.
        order: 1 = Euler; 2 = the two-step Adams-Bashforth method, which costs no further forward.
        cache: Threshold of the first-block cache, 0 = off.
        weights: ``int8`` = 8-bit copies of the transformer's large layers; None = the weights themselves.
    """

    steps: int | None = None
    order: int = 1
    cache: float = 0.0
    weights: str | None = None

    def sigmas(self, sigmas: torch.Tensor) -> torch.Tensor:
        """Those of ``sigmas`` (n + 1,), from the tail's first to 0, at which the tail stops: evenly spread by number, so
        that they keep the schedule's shape."""
        count = len(sigmas) - 1
        if self.steps is None or self.steps >= count:
            return sigmas
        return sigmas[torch.from_numpy(np.linspace(0, count, self.steps + 1).round().astype(np.int64))]


def integrate(
    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    sigmas: torch.Tensor,
    order: int = 1,
) -> torch.Tensor:
    """dx/dσ = v(x, σ) from the first to the last of ``sigmas``.

    Order 2 extrapolates the velocity to the middle of the step from its last two values (Adams-Bashforth with steps h of
    any length, Hairer, Nørsett, Wanner, Solving Ordinary Differential Equations I, III.5); its first step is Euler's.

    Args:
        velocity: (x (B, N, C), σ (B,)) → (B, N, C).
        x: (B, N, C) at the first σ.
        sigmas: (n + 1,), falling.
        order: 1 or 2.
    """
    last: tuple[torch.Tensor, float] | None = None
    for i in range(len(sigmas) - 1):
        pair = to_device(sigmas[i : i + 2], x.device)
        sigma, sigma_next = pair[0].expand(x.shape[0]), pair[1].expand(x.shape[0])
        v = velocity(x, sigma)
        slope = v
        if order == 2:
            step = float(sigmas[i + 1] - sigmas[i])
            if last is not None:
                slope = v + step / (2 * last[1]) * (v - last[0])
            last = v, step
        x = euler_step(x, slope, sigma, sigma_next)
    return x
