"""Shows that a policy samples what its pipeline's own call samples, before anything is trained.

A wrong text, a wrong σ, lost guidance or a lost reference does not stop a run: it trains something
else, and its adapter does not work elsewhere.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves

from paco_grpo.policies.base import PolicyLoadError
from paco_grpo.policies.diffusers_policy import DiffusersPolicy, on_white
from paco_grpo.types import Conditioning, Item

_SEEDS = (2, 3)
_LARGEST = 1  # of 255 levels, of any value in float32
# In lower precision, where the pipeline also rounds its latents at each step:
_MEAN = 1.0
_NEAR = 8  # levels
_SHARE_NEAR = 0.999
# Relative error of velocities in a shared forward, in float32 and below
_SHARED_ERROR = {torch.float32: 1e-3}
_SHARED_ERROR_ROUNDED = 0.05


@dataclass(frozen=True)
class Difference:
    """Between two images of a size, in levels of 255."""

    height: int
    width: int
    largest: int
    mean: float
    share_near: float  # of all values, those within ``_NEAR`` levels


@dataclass(frozen=True)
class Proof:
    """What differs between a policy's parts and its pipeline's call."""

    differences: tuple[Difference, ...]  # of each size
    shared_error: float  # relative, between velocities in a forward of two samples and alone

    @property
    def largest(self) -> int:
        """Of all sizes, in levels of 255."""
        return max(difference.largest for difference in self.differences)


@torch.no_grad()
def prove(
    policy: DiffusersPolicy, item: Item, sizes: Sequence[tuple[int, int]], num_steps: int = 4
) -> Proof:
    """Compare images of ``item`` by ``policy``'s parts with those of its pipeline's own call.

    Guidance, negative prompt and length of the text are those that the policy was loaded with. Use
    an item of the run, with its references: what has no effect on the image is not proved.

    Args:
        policy: Before it is wrapped for several processes.
        item: Its size is not used.
        sizes: Heights and widths, multiples of ``size_multiple``; a small one first, so that a
            fault shows in seconds.
        num_steps: Of the schedule; each step shows an error in any of them.

    Raises:
        PolicyLoadError: The images differ by more than rounding, or one of the two ways fails.
    """
    item = item.load()
    differences = []
    try:
        for number, (height, width) in enumerate(sizes, start=1):
            sized = dataclasses.replace(item, height=height, width=width)
            ours = _own_image(policy, sized, num_steps)
            theirs = _pipeline_image(policy, sized, num_steps)
            if not ours.size == theirs.size == (width, height):
                if number == 1 < len(sizes):
                    continue  # a pipeline of fixed sizes makes no small image
                raise ValueError(f"the call makes one of {theirs.height}x{theirs.width}")
            differences.append(_check(policy, _difference(ours, theirs)))
            if len(differences) == 1:
                shared_error = _check_shared(policy, sized)
    except (PolicyLoadError, torch.OutOfMemoryError):  # memory is not the policy's fault
        raise
    except Exception as error:
        raise PolicyLoadError(
            f"{policy.family} cannot be trained: an image of {height}x{width} fails "
            f"({type(error).__name__}: {error})"
        ) from error
    return Proof(tuple(differences), shared_error)


def _own_image(policy: DiffusersPolicy, item: Item, num_steps: int) -> Image.Image:
    conditioning = policy.encode([item])
    sigmas = policy.sigmas(num_steps, *item.size).to(policy.device)
    x = policy.initial_latents(_SEEDS[:1], *item.size)
    for sigma, sigma_next in itertools.pairwise(sigmas):
        velocity = policy.velocity(x, sigma[None], conditioning, *item.size)
        # The scheduler rounds both, and training neither.
        velocity = velocity.to(policy.step_dtype)
        x = (x + (sigma_next - sigma) * velocity).to(policy.step_dtype).float()
    with policy.autocast():  # as in the pipeline's call; training decodes in float32
        (image,) = policy.decode(x.to(policy.step_dtype), *item.size)
    return image


def _pipeline_image(policy: DiffusersPolicy, item: Item, num_steps: int) -> Image.Image:
    arguments = policy.pipeline_arguments(item)
    _check_complete(policy, item, arguments)
    with policy.whole_pipeline(item) as pipe, policy.autocast():
        pipe.set_progress_bar_config(disable=True)
        result = pipe(  # pyright: ignore[reportCallIssue] - each pipeline defines its own
            **arguments,
            **policy.noise_arguments(_SEEDS[0], item),
            num_inference_steps=num_steps,
        )
    return result[0][0]


def _check_complete(policy: DiffusersPolicy, item: Item, arguments: dict[str, Any]) -> None:
    """What is missing in the arguments of the call is missing in both images."""
    values = tree_leaves(arguments)
    texts = [value for value in values if isinstance(value, str)]
    images = [value for value in values if isinstance(value, Image.Image)]
    if item.prompt not in texts:
        raise ValueError("the arguments of its call lack the prompt")
    if len(images) < item.num_references:
        raise ValueError(
            f"the arguments of its call have {len(images)} of {item.num_references} references"
        )
    has_negative = policy.uses_true_cfg and policy.negative_prompt is not None
    if has_negative and policy.negative_prompt not in texts:
        raise ValueError("the arguments of its call lack the negative prompt")


def _difference(ours: Image.Image, theirs: Image.Image) -> Difference:
    first = np.asarray(on_white(ours), np.float64)
    levels = np.abs(first - np.asarray(on_white(theirs), np.float64))
    return Difference(
        height=ours.height,
        width=ours.width,
        largest=int(levels.max()),
        mean=float(levels.mean()),
        share_near=float((levels <= _NEAR).mean()),
    )


def _check(policy: DiffusersPolicy, difference: Difference) -> Difference:
    if policy.dtype == torch.float32:
        is_rounding = difference.largest <= _LARGEST
    else:
        is_rounding = difference.mean <= _MEAN and difference.share_near >= _SHARE_NEAR
    if not is_rounding:
        raise PolicyLoadError(
            f"{policy.family} cannot be trained: at {difference.height}x{difference.width}, an "
            f"image differs from its pipeline's own by up to {difference.largest} of "
            f"255 levels (mean {difference.mean:.2f}, {100 * difference.share_near:.2f} % within "
            f"{_NEAR}), which is more than rounding"
        )
    return difference


def _check_shared(policy: DiffusersPolicy, item: Item) -> float:
    """The relative error of velocities of two samples in a forward."""
    row = policy.encode([item])
    rows = Conditioning.cat([row] * len(_SEEDS))
    x = policy.initial_latents(_SEEDS, *item.size)
    sigma = torch.full((len(_SEEDS),), 0.7, device=policy.device)
    shared = policy.velocity(x, sigma, rows, *item.size)
    alone = [policy.velocity(one, sigma[:1], row, *item.size) for one in x.split(1)]
    expected = torch.cat(alone)
    error = float((shared - expected).norm() / expected.norm())
    limit = _SHARED_ERROR.get(policy.dtype, _SHARED_ERROR_ROUNDED)
    if not error <= limit:
        raise PolicyLoadError(
            f"{policy.family} cannot be trained: in a forward of two samples, velocities differ by "
            f"{100 * error:.1f} % from those of a sample alone, which is more than rounding"
        )
    return error
