"""From items to images: sizes, batches that share a forward, and decoding."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from PIL import Image

from paco_grpo.data.prompts import item_size, round_to_multiple
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


@cache
def decoding_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of the decoding thread.

    One for the process, because the memory pool of an unused stream is lost.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class Decoder:
    """Decodes the latents of batches and delivers the images, in order.

    With ``overlap``, one thread decodes a batch, on CUDA with its own stream, while the caller
    denoises the next one. At most one batch waits, so that latents do not pile up. At the end of
    the block everything is delivered.

        with Decoder(policy, deliver) as decoder:
            for batch in batches:
                decoder.submit(rollout(…).clean_latents, batch)
    """

    def __init__(
        self,
        policy: Policy,
        deliver: Callable[[list[Image.Image | None], Batch], None],
        overlap: bool | None = None,
    ) -> None:
        """``deliver`` gets the images of each batch, in the thread that decoded it.

        An image is None if its latents are not finite. Errors of ``deliver`` are raised by a later
        ``submit`` or at the end of the block. ``overlap`` None: on CUDA. On a CPU, denoising and
        decoding would compete for the same cores.
        """
        self.policy = policy
        self.deliver = deliver
        if overlap is None:
            overlap = policy.device.type == "cuda"
        self._stream = decoding_stream(policy.device) if overlap else None
        self._thread = ThreadPoolExecutor(1) if overlap else None
        self._last: Future | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._thread is None:
            return
        self._thread.shutdown(wait=True)
        if error_type is None and self._last is not None:
            self._last.result()  # raises the thread's error

    def submit(self, latents: torch.Tensor, batch: Batch) -> None:
        """Decode ``latents`` of ``batch``, now or in the thread."""
        if self._thread is None:
            self._decode(latents, batch)
            return
        if self._last is not None:
            self._last.result()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(latents.device))
            latents.record_stream(self._stream)
        self._last = self._thread.submit(self._decode, latents, batch)

    def _decode(self, latents: torch.Tensor, batch: Batch) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            decoded = self.policy.decode(latents, batch.height, batch.width)
            # Latents that are not finite become black pixels, which would be scored.
            finite = latents.isfinite().flatten(1).all(dim=1).tolist()
        images = [image if good else None for image, good in zip(decoded, finite, strict=True)]
        if not all(finite):
            logger.warning(
                "%d of %d images of a batch are not finite; they get no score",
                finite.count(False),
                len(finite),
            )
        self.deliver(images, batch)
