"""What is measured every epoch to detect a collapse; the rules are in ``signs.py``."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from paco_grpo.distributed import gather_rows
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import reference_weights
from paco_grpo.sampling.denoise import integrate
from paco_grpo.sampling.images import at_size
from paco_grpo.types import Conditioning, Item, Stream

_THUMBNAIL = 16  # pixels a side, enough to tell pictures apart


class SampleObserver:
    """Collects statistics of one process's samples while they are drawn, and keeps no image."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def add(self, images: Sequence[Image.Image | None], numbers: Sequence[int]) -> None:
        """Take in the images of the samples ``numbers``; None: it is not finite."""
        for number, image in zip(numbers, images, strict=True):
            self._rows[number] = np.full(3 * _THUMBNAIL**2, math.nan)
            if image is not None:
                small = image.convert("RGB").resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
                self._rows[number] = np.asarray(small, dtype=np.float64).ravel() / 255

    def metrics(
        self, clean_latents: Sequence[torch.Tensor], item_ids: np.ndarray
    ) -> dict[str, float]:
        """The spread of latents and images over all processes; a collective operation.

        Args:
            clean_latents: (1, L, C), of each of this process's samples.
            item_ids: (N,), of all samples, by position.

        Returns:
            ``health/finite_share``, the share of finite images. The others are over these:
            ``health/latent_std``, NaN if there are none, and ``health/distinctness``, the standard
            deviation of a pixel over the images of a prompt, if a prompt has two.
        """
        spread = [float(x.float().std(unbiased=False)) for x in clean_latents]
        images = [self._rows[number] for number in range(len(spread))]
        everyone = gather_rows(np.column_stack([spread, images]))
        is_finite = np.isfinite(everyone).all(axis=1)
        metrics = {"health/finite_share": float(is_finite.mean()), "health/latent_std": math.nan}
        if is_finite.any():
            metrics["health/latent_std"] = float(everyone[is_finite, 0].mean())
        variances = []
        for item in np.unique(item_ids):
            group = everyone[is_finite & (item_ids == item), 1:]
            if len(group) > 1:
                variances.append(group.var(axis=0).mean())
        if variances:
            metrics["health/distinctness"] = math.sqrt(np.mean(variances))
        return metrics


class _State(NamedTuple):
    """Latents that the reference sampled for one item, and its velocity there."""

    velocity: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (latents, σ) → velocity
    latents: torch.Tensor  # (1, L, C)
    sigma: torch.Tensor  # (1,)
    reference: torch.Tensor  # (1, L, C), the reference's velocity


class ReferenceProbe:
    """How far the trained generator is from the reference, on a few test items with fixed noise.

    The reference (``lora.reference_weights``) denoises once up to the first noise step. A resumed
    run computes the same states again.
    """

    def __init__(self, policy: Policy, items: Sequence[Item], options: RunOptions) -> None:
        self.policy = policy
        self.items = list(items)
        self.options = options
        self._sized: list[Item] = []  # with their images
        self._states: list[_State] = []  # of each item

    def load(self) -> None:
        """Read the items' images, without a forward."""
        options = self.options
        for item in self.items:
            sized = at_size(item, options.train.resolution, options.item_size, self.policy)
            self._sized.append(sized)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute the reference's states and velocities, at the first call only."""
        if self._states:
            return
        if not self._sized:
            self.load()
        options = self.options
        policy = self.policy
        step = min(options.sample.noise_steps, default=min(1, options.sample.num_steps - 1))
        with reference_weights(policy):
            for number, sized in enumerate(self._sized):
                size = sized.height, sized.width
                text = policy.encode([sized], options.train.max_sequence_length)
                velocity = partial(self._velocity, text, size)
                words = np.random.SeedSequence([Stream.PROBE, options.seed, number])
                word = words.generate_state(1, np.uint64)[0]
                sigmas = policy.sigmas(options.sample.num_steps, *size)
                noise = policy.initial_latents([int(word >> np.uint64(1))], *size)
                latents = integrate(velocity, noise, sigmas[: step + 1])
                sigma = sigmas[step].to(latents.device).expand(1)
                self._states.append(_State(velocity, latents, sigma, velocity(latents, sigma)))

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """``health/velocity_change``: mean ‖v − v_ref‖/‖v_ref‖ over the probe set."""
        self.prepare()
        changes = []
        for state in self._states:
            velocity = state.velocity(state.latents, state.sigma)
            change = (velocity - state.reference).norm() / state.reference.norm()
            changes.append(float(change))
        return {"health/velocity_change": float(np.mean(changes))}

    def _velocity(
        self,
        conditioning: Conditioning,
        size: tuple[int, int],
        x: torch.Tensor,
        sigma: torch.Tensor,
    ) -> torch.Tensor:
        return self.policy.velocity(x, sigma, conditioning, *size)
