"""From items to images: the one loop that training, evaluation and generation sample with."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from paco_grpo.data.prompts import item_size, round_to_multiple
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.denoise import Sampling, rollout
from paco_grpo.types import Item, Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Images that share a forward."""

    numbers: list[int]  # which of the caller's images
    height: int  # pixels
    width: int  # pixels


def at_size(item: Item, resolution: int, mode: str, policy: Policy) -> Item:
    """``item`` with its sampled size in pixels, and its images loaded.

    An edit without a size takes its image's shape. ``resolution`` is the side of a square of the wanted area, ``mode`` is
    ``config.item_size``.
    """
    item = item.load()
    if item.num_images and (mode == "aspect" or item.height is None):
        height, width = policy.size_like(item, resolution)
    elif mode == "exact":
        height, width = policy.round_size(*item_size(item, resolution, mode))
    else:
        height, width = round_to_multiple(item_size(item, resolution, mode), policy.size_multiple)
    return dataclasses.replace(item, height=height, width=width)


def batches_by_key(keys: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Indices into ``keys`` in batches of equal key."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return [
        group[i : i + batch_size]
        for group in groups.values()
        for i in range(0, len(group), batch_size)
    ]


def plan_batches(
    policy: Policy, items: Sequence[Item], resolution: int, item_size_mode: str, batch_size: int
) -> list[Batch]:
    """Batches of ``items`` that share a forward; ``numbers`` are indices into ``items``."""
    sizes, keys = [], []
    for item in items:  # one reference image in memory at a time
        sized = at_size(item, resolution, item_size_mode, policy)
        sizes.append((sized.height, sized.width))
        keys.append(policy.batch_key(sized))
    return [Batch(numbers, *sizes[numbers[0]]) for numbers in batches_by_key(keys, batch_size)]


@cache
def decoding_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of the decoding thread; one for the process, because the memory pool of an unused stream is lost."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def sample_images(
    policy: Policy,
    batches: Iterable[tuple[Batch, bool]],
    inputs: Callable[[Batch], dict[str, Any]],
    deliver: Callable[[list, Batch], None],
    sampling: Sampling,
    overlap_decode: bool = False,
) -> Iterator[tuple[Batch, Rollout]]:
    """Denoise, decode and deliver batch by batch; yields each batch with its rollout, after its decoding has begun.

    Args:
        batches: (batch, is_dummy) as in ``Replicated.synced_batches``; the result of a dummy is dropped.
        inputs: Batch → ``conditioning``, ``item_ids``, ``seeds`` and perhaps ``shared_seeds`` of ``rollout``.
        deliver: Gets the PIL images of each batch, in order (None: its latents are not finite), in the thread that decoded
            it. Its errors are raised here.
        overlap_decode: One thread decodes a batch, on CUDA with its own stream, while the next one is denoised. At most one
            waits, so that latents do not pile up. On a CPU both would compete for the same cores.
    """
    stream = decoding_stream(policy.device) if overlap_decode else None

    def decode(latents: torch.Tensor, batch: Batch) -> None:
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            images = policy.decode(latents, batch.height, batch.width)
            finite = (
                latents.isfinite().flatten(1).all(dim=1).tolist()
            )  # others are black pixels, which would be scored
        if not all(finite):
            logger.warning(
                "%d of %d images of a batch are not finite; they get no score",
                finite.count(False),
                len(finite),
            )
        deliver(
            [image if good else None for image, good in zip(images, finite, strict=True)], batch
        )

    last: Future | None = None
    with (
        ThreadPoolExecutor(1) if overlap_decode else nullcontext() as thread
    ):  # at its end nothing is delivered any more
        for batch, is_dummy in batches:
            result = rollout(
                policy, height=batch.height, width=batch.width, sampling=sampling, **inputs(batch)
            )
            if is_dummy:
                continue
            latents = result.clean_latents
            if thread is None:
                decode(latents, batch)
            else:
                if last is not None:
                    last.result()
                if stream is not None:
                    stream.wait_stream(torch.cuda.current_stream(latents.device))
                    latents.record_stream(stream)
                last = thread.submit(decode, latents, batch)
            yield batch, result
        if last is not None:
            last.result()
