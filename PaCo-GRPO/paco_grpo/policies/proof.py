"""Shows that a policy samples what its pipeline's own call samples, before anything is trained.

A wrong text, a wrong σ, lost guidance or a lost reference does not stop a run: it trains something
else, and the adapter does not work elsewhere.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from paco_grpo.policies.base import PolicyLoadError
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, on_white
from paco_grpo.types import Conditioning, Item

_SEEDS = (2, 3)
_LARGEST = 1  # float32: of 255 levels, in every pixel and channel
# Lower precision: two ways to the same velocity round differently.
_MEAN = 1.0
_NEAR = 8
_SHARE_NEAR = 0.999


@dataclass(frozen=True)
class Difference:
    """Between two images of one size, in levels of 255."""

    height: int
    width: int
    largest: int
    mean: float
    share_near: float  # of all values, those within ``_NEAR`` levels


@dataclass(frozen=True)
class Proof:
    """Differences between the policy's images and the pipeline's, the largest of each size."""

    differences: tuple[Difference, ...]

    @property
    def largest(self) -> int:
        """Of all sizes, in levels of 255."""
        return max(difference.largest for difference in self.differences)


@torch.no_grad()
def prove(
    policy: DiffusersPolicy, item: Item, sizes: Sequence[tuple[int, int]], num_steps: int = 4
) -> Proof:
    """Compare images of ``item`` by ``policy``'s parts and by its pipeline's own call.

    Guidance, negative prompt and length of the text are those that the policy was loaded with. Use
    an item of the run, with its references: what has no effect on the image is not proved.

    Args:
        policy: Before it is wrapped for several processes.
        item: Its size is not used.
        sizes: Heights and widths, multiples of ``size_multiple``; a small one first, so that what
            is wrong shows in seconds. At the first size, two images share a forward.
        num_steps: Of the schedule. Four are enough: each step shows an error of any.

    Raises:
        PolicyLoadError: The images differ by more than rounding, or one of the two ways fails.
    """
    item = item.load()
    differences = []
    for number, (height, width) in enumerate(sizes):
        sized = dataclasses.replace(item, height=height, width=width)
        seeds = _SEEDS if number == 0 else _SEEDS[:1]
        try:
            ours = _own_images(policy, sized, seeds, num_steps)
            theirs = [_pipeline_image(policy, sized, seed, num_steps) for seed in seeds]
        except Exception as error:
            raise PolicyLoadError(
                f"{policy.family} cannot be trained: an image of {height}x{width} fails "
                f"({type(error).__name__}: {error})"
            ) from error
        pairs = zip(ours, theirs, strict=True)
        difference = max((_difference(*pair) for pair in pairs), key=lambda d: d.largest)
        differences.append(difference)
        if not _is_rounding(difference, policy.dtype):
            raise PolicyLoadError(
                f"{policy.family} cannot be trained: at {height}x{width}, images from the parts of "
                "its call differ from those of the call itself by up to "
                f"{difference.largest} of 255 levels (mean {difference.mean:.2f}, "
                f"{100 * difference.share_near:.1f} % within {_NEAR}), which is more than rounding"
            )
    return Proof(tuple(differences))


def _own_images(
    policy: DiffusersPolicy, item: Item, seeds: Sequence[int], num_steps: int
) -> list[Image.Image]:
    """By Euler steps, with one forward a step for all ``seeds``."""
    conditioning = Conditioning.cat([policy.encode([item])] * len(seeds))
    sigmas = policy.sigmas(num_steps, *item.size)
    x = policy.initial_latents(seeds, *item.size)
    for sigma, sigma_next in itertools.pairwise(sigmas.to(policy.device)):
        sigma_of_rows = sigma.expand(len(seeds))
        velocity = policy.velocity(x, sigma_of_rows, conditioning, *item.size)
        x = x + (sigma_next - sigma) * velocity
    with policy.autocast():  # as the pipeline's call; training decodes in float32
        return policy.decode(x, *item.size)


def _pipeline_image(policy: DiffusersPolicy, item: Item, seed: int, num_steps: int) -> Image.Image:
    with policy.whole_pipeline(item) as pipe, policy.autocast():
        pipe.set_progress_bar_config(disable=True)
        result = pipe(  # pyright: ignore[reportCallIssue] - each pipeline defines its own
            **policy.pipeline_arguments(item),
            **policy.noise_arguments(seed, item),
            num_inference_steps=num_steps,
        )
    return result[0][0]


def _difference(ours: Image.Image, theirs: Image.Image) -> Difference:
    if ours.size != theirs.size:
        raise ValueError(f"the call makes an image of {theirs.height}x{theirs.width}")
    first = np.asarray(on_white(ours), np.float64)
    levels = np.abs(first - np.asarray(on_white(theirs), np.float64))
    return Difference(
        height=ours.height,
        width=ours.width,
        largest=int(levels.max()),
        mean=float(levels.mean()),
        share_near=float((levels <= _NEAR).mean()),
    )


def _is_rounding(difference: Difference, dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return difference.largest <= _LARGEST
    return difference.mean <= _MEAN and difference.share_near >= _SHARE_NEAR
