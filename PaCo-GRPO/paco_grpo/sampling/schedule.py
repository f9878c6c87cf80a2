"""Which steps of the schedule are noisy (MixGRPO, arXiv 2507.21802: noise, and training, on a few steps only)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sample_noise_steps(
    noise_steps: Sequence[int], num_noise_steps: int | None, seed: int, epoch: int
) -> tuple[int, ...]:
    """The noise steps of one epoch: all of ``noise_steps``, or ``num_noise_steps`` sampled from them.

    The choice depends on ``seed`` and ``epoch`` alone, so every process makes the same one, also after a resume.

    Returns:
        Ascending step indices without repetition.

    Raises:
        ValueError: ``num_noise_steps`` is not between 1 and the number of distinct noise steps.
    """
    candidates = sorted(set(noise_steps))
    if num_noise_steps is None:
        return tuple(candidates)
    if not 1 <= num_noise_steps <= len(candidates):
        raise ValueError(
            f"sample.num_noise_steps = {num_noise_steps} must lie between 1 and the {len(candidates)} entries of "
            f"sample.noise_steps {tuple(noise_steps)}"
        )
    chosen = np.random.default_rng([seed, epoch]).choice(candidates, size=num_noise_steps, replace=False)
    return tuple(int(step) for step in sorted(chosen))


def check_noise_steps(noise_steps: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """Ascending noise steps.

    Raises:
        ValueError: One lies outside the ``num_steps`` sampling steps or is repeated.
    """
    outside = [step for step in noise_steps if not 0 <= step < num_steps]
    if outside:
        raise ValueError(f"noise steps {outside} lie outside the {num_steps} sampling steps (0 to {num_steps - 1})")
    if len(set(noise_steps)) != len(noise_steps):
        raise ValueError(f"noise steps {tuple(noise_steps)} name a step twice")
    return tuple(sorted(noise_steps))
