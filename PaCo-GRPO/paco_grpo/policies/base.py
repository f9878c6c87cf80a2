"""The interface of a generator: all that sampling, objectives and the trainer know about a model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from paco_grpo.types import Conditioning, Item

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)


class PolicyLoadError(RuntimeError):
    """A model could not be loaded; the message names it and says what to do."""


class Policy(ABC):
    """A flow-matching generator with a trainable transformer.

    σ lives in [0, 1] (1 = noise); only the policy knows what its transformer wants. Every forward of the transformer
    goes through ``velocity``, which applies the policy's own autocast, so that rollout and training compute the same
    numbers.

    Attributes:
        transformer: The trainable part. The trainer may replace it by a wrapped one (DDP, FSDP).
        lora_targets: Module-name suffixes inside ``transformer`` that get a LoRA (method §6).
        edits_images: Whether an item needs a reference image.
        has_true_cfg: Whether a negative prompt means something to it.
        masks_text: Whether texts of unequal length are padded and masked (else the padding counts as text).
        text_limit: Most text tokens it takes.
        tokenizer_folder: Of the pipeline; its tokens are what ``max_sequence_length`` counts.
        size_multiple: Heights and widths must be multiples of this many pixels.
        offloads_text_encoders: Whether ``encode`` has to bring them first, so that many items at a time are better.
        device: Where the transformer computes.
        dtype: Computing precision of the transformer; latents stay float32.
    """

    lora_targets: ClassVar[tuple[str, ...]] = ()
    edits_images: ClassVar[bool] = False
    has_true_cfg: ClassVar[bool] = False
    masks_text: ClassVar[bool] = False
    text_limit: ClassVar[int] = 512
    tokenizer_folder: ClassVar[str] = "tokenizer"
    offloads_text_encoders: bool = False

    transformer: nn.Module
    size_multiple: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    @abstractmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_sequence_length: int = 512,
        guidance_scale: float = 3.5,
        negative_prompt: str | None = None,
    ) -> Self:
        """Load a diffusers pipeline folder (or hub name), everything frozen and in evaluation mode.

        Raises:
            PolicyLoadError: It cannot be loaded; the message names the folder and the remedy.
        """

    @abstractmethod
    def encode(self, items: Sequence[Item]) -> Conditioning:
        """Conditioning of ``items``, one row each, on ``device``.

        A text (and reference image) is encoded once, on its own, and remembered: the features do not depend on the
        other items. ``height`` and ``width`` of an item are the size at which it will be drawn.
        """

    @abstractmethod
    def sigmas(self, num_steps: int, height: int, width: int) -> torch.Tensor:
        """Schedule (num_steps + 1,) float32 on the CPU, falling from 1 to exactly 0, with the model's own shift."""

    @abstractmethod
    def initial_latents(self, seeds: Sequence[int], height: int, width: int) -> torch.Tensor:
        """Gaussian noise (B, N, C) float32 on ``device``; row b depends only on ``seeds[b]`` and the size."""

    @abstractmethod
    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning, height: int, width: int
    ) -> torch.Tensor:
        """Predicted v = noise − x_0.

        Args:
            latents: x_σ (B, N, C) float32.
            sigma: (B,) float32 in [0, 1].
            conditioning: len B.
            height: Pixels, a multiple of ``size_multiple``.
            width: Pixels, a multiple of ``size_multiple``.

        Returns:
            (B, N, C) float32.
        """

    def conditional_velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning, height: int, width: int
    ) -> torch.Tensor:
        """``velocity`` without true CFG (DiffusionNFT trains this one); the same where the model has none."""
        return self.velocity(latents, sigma, conditioning, height, width)

    @abstractmethod
    def decode(self, latents: torch.Tensor, height: int, width: int) -> list[Image.Image]:
        """Images of clean latents (B, N, C) float32, each ``height`` x ``width`` RGB."""

    @abstractmethod
    def save_lora(self, directory: str | Path) -> None:
        """Write the active LoRA so that the plain diffusers pipeline's ``load_lora_weights(directory)`` reads it."""

    def move_text_encoders(self, device: torch.device | str) -> None:
        """Move what only ``encode`` needs, for example off the accelerator; ``encode`` works wherever it is."""

    def move_vae(self, device: torch.device | str) -> None:
        """Move what only ``decode`` (and encoding of reference images) needs; both work wherever it is."""

    def offload(self, text_encoders: bool, vae: bool) -> None:
        """From now on keep these off the accelerator while they compute nothing; a policy may ignore it."""

    def autocast(self) -> AbstractContextManager:
        """The autocast of every transformer forward, in rollout and training alike."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def reference(self) -> AbstractContextManager:
        """The base model inside the block (adapters off); for forwards without gradient."""
        from paco_grpo.policies.adapters import adapters_off

        return adapters_off(self)

    def snapshot(self, name: str) -> AbstractContextManager:
        """The adapter ``name`` instead of the trained one inside the block; for forwards without gradient."""
        from paco_grpo.policies.adapters import adapter

        return adapter(self, name)

    def merged(self) -> AbstractContextManager:
        """The active LoRA merged into the base weights inside the block, bit for bit undone after it."""
        from paco_grpo.policies.adapters import merged

        return merged(self)

    def in_int8(self) -> AbstractContextManager:
        """Approximate forwards inside the block, by 8-bit copies of the layers that see every token."""
        from paco_grpo.policies.adapters import unwrap
        from paco_grpo.policies.quantized import in_int8

        return in_int8(unwrap(self.transformer), self.dtype)

    @classmethod
    def size_multiple_with(cls, vae: Mapping[str, Any]) -> int:
        """``size_multiple`` by the VAE's configuration alone: its levels halve the sides, and 2x2 latents are a token."""
        return 2 * 2 ** (len(vae["block_out_channels"]) - 1)

    def cached(self, threshold: float) -> AbstractContextManager:
        """Approximate forwards inside the block, by a first-block cache that is empty at its start."""
        from paco_grpo.policies.acceleration import block_cache

        return block_cache(self, threshold)

    def batch_key(self, item: Item) -> Hashable:
        """Samples may share a forward if their items' keys are equal; ``item`` has the size at which it is drawn."""
        return item.height, item.width

    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        """Height and width at which an edit is drawn: the shape of ``item``, or else of its image, at ``resolution``².

        Raises:
            NotImplementedError: The policy edits no images.
        """
        raise NotImplementedError(f"{type(self).__name__} edits no images")

    def round_size(self, height: int, width: int) -> tuple[int, int]:
        """Largest multiples of ``size_multiple`` not above the request, as diffusers' pipelines round; logged.

        Raises:
            ValueError: A side is smaller than ``size_multiple``.
        """
        multiple = self.size_multiple
        rounded = (height // multiple * multiple, width // multiple * multiple)
        if min(rounded) < multiple:
            raise ValueError(f"image size {height}x{width} is too small: both sides need at least {multiple} pixels")
        if rounded != (height, width):
            logger.info("size %dx%d rounded to %dx%d (multiple of %d)", height, width, *rounded, multiple)
        return rounded
