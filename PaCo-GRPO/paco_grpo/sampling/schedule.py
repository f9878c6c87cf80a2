"""Which steps of the schedule are noisy (MixGRPO, arXiv 2507.21802: noise, and training, on a few steps only)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sample_noise_steps(
    noise_steps: Sequence[int], num_noise_steps: int | None, seed: int, epoch: int
) -> tuple[int, ...]:
    """The noise steps of one epoch, ascending: all of ``noise_steps``, or ``num_noise_steps`` sampled from them.

    The choice depends on ``seed`` and ``epoch`` alone, so every process makes the same one, also after a resume.
    """
    candidates = sorted(set(noise_steps))
    if num_noise_steps is None:
        return tuple(candidates)
    chosen = np.random.default_rng([seed, epoch]).choice(candidates, size=num_noise_steps, replace=False)
    return tuple(int(step) for step in sorted(chosen))
