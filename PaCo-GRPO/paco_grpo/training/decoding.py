"""From clean latents to images and rewards, beside the sampling of the next batch where that helps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch

from paco_grpo.policies.base import Policy

if TYPE_CHECKING:
    from PIL import Image


class Decoder:
    """Decodes batches in order and hands their images on.

    In the background this is one thread, on CUDA with a stream of its own: the next batch's denoising is launched while
    the VAE runs, pixels cross to the CPU and statistics and rewards begin. On a CPU both would compete for the same
    cores. The images are the same either way. At most one batch waits, so that latents and pixels do not pile up.

    Args:
        policy: Decodes.
        deliver: Called as ``deliver(images, *arguments)`` for each batch, in the thread that decoded it.
        background: Whether to use the thread.
    """

    def __init__(self, policy: Policy, deliver: Callable[..., None], background: bool) -> None:
        self.policy, self.deliver = policy, deliver
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="decode") if background else None
        self._stream = torch.cuda.Stream(policy.device) if background and policy.device.type == "cuda" else None
        self._last: Future | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def submit(self, latents: torch.Tensor, height: int, width: int, *arguments: Any) -> None:
        """Decode ``latents`` (B, N, C); an exception of the batch before is raised here."""
        self.wait()
        if self._pool is None:
            self._work(latents, height, width, arguments)
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(latents.device))
            latents.record_stream(self._stream)
        self._last = self._pool.submit(self._work, latents, height, width, arguments)

    def wait(self) -> None:
        """Until everything submitted was handed on; an exception on the way is raised here."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def _work(self, latents: torch.Tensor, height: int, width: int, arguments: tuple) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            images: list[Image.Image] = self.policy.decode(latents, height, width)
        self.deliver(images, *arguments)
