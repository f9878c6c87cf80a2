"""From items to images: sizes, batches that share a forward, and decoding."""

import dataclasses
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from paco_grpo.policies.base import Policy
from paco_grpo.types import Item

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Images that share a forward."""

    numbers: list[int]  # which of the caller's images
    height: int  # pixels
    width: int  # pixels


def at_size(item: Item, resolution: int, mode: str, policy: Policy) -> Item:
    """``item`` with its sampled size in pixels, and its images loaded.

    An edit without a size takes its image's shape. ``resolution`` is the side of a square of the
    wanted area, ``mode`` is ``config.item_size``.
    """
    item = item.load()
    if item.num_references and (mode == "aspect" or item.height is None):
        height, width = policy.size_like(item, resolution)
    elif mode == "exact":
        height, width = policy.round_size(*item_size(item, resolution, mode))
    else:
        height, width = round_to_multiple(item_size(item, resolution, mode), policy.size_multiple)
    return dataclasses.replace(item, height=height, width=width)


def item_size(item: Item, resolution: int, mode: str) -> tuple[int, int]:
    """Height and width in pixels of a generated item, before rounding to the model's multiple.

    ``mode``: ``exact``: the item's size unchanged; ``aspect``: its shape at area ``resolution``².
    """
    if item.height is None or item.width is None:
        return resolution, resolution
    if mode == "exact":
        return item.height, item.width
    scale = resolution / math.sqrt(item.height * item.width)
    return round(item.height * scale), round(item.width * scale)


def round_to_multiple(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Both sides rounded to the nearest multiple, at least one multiple each."""
    height, width = size
    rounded_height = max(multiple, round(height / multiple) * multiple)
    rounded_width = max(multiple, round(width / multiple) * multiple)
    return rounded_height, rounded_width


def batches_by_key(keys: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Indices into ``keys`` in batches of equal key."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    batches = []
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            batches.append(group[start : start + batch_size])
    return batches


def plan_batches(
    policy: Policy, items: Sequence[Item], resolution: int, item_size_mode: str, batch_size: int
) -> list[Batch]:
    """Batches of ``items`` that share a forward; ``numbers`` are indices into ``items``."""
    sizes = []
    keys = []
    for item in items:  # one reference image in memory at a time
        sized = at_size(item, resolution, item_size_mode, policy)
        sizes.append((sized.height, sized.width))
        keys.append(policy.batch_key(sized))
    return [Batch(numbers, *sizes[numbers[0]]) for numbers in batches_by_key(keys, batch_size)]


def decode(policy: Policy, latents: torch.Tensor, batch: Batch) -> list[Image.Image | None]:
    """The images of ``batch`` from their clean latents; None where those are not finite.

    They would become black pixels, which would be scored.
    """
    images: list[Image.Image | None] = list(policy.decode(latents, batch.height, batch.width))
    finite = latents.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        logger.warning(
            "%d of %d images of a batch are not finite; they get no score",
            finite.count(False),
            len(finite),
        )
    return [image if is_finite else None for image, is_finite in zip(images, finite, strict=True)]
