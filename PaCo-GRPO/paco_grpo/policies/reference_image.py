"""Reference images of the policies that edit: their size, their latents, and which samples may share a forward."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from paco_grpo.policies.diffusers_policy import CACHE_BYTES, DiffusersPolicy
from paco_grpo.policies.performance.cache import TensorCache
from paco_grpo.types import Conditioning, Item

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """A reference image as the encoders see it."""

    image: Image.Image  # RGB
    key: Hashable  # of content and size: two files with the same picture are one

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.height, self.image.width


@dataclass
class ReferenceConditioning(Conditioning):
    """Packed latents of each sample's reference image, padded to the longest."""

    reference: torch.Tensor  # (B, M, C) in the policy's dtype; padding behind a row's own tokens is never used
    reference_grid: (
        torch.Tensor
    )  # (B, 2) int64, rows and columns of each; on the CPU, where reading does not synchronize

    def with_reference(self, latents: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """``latents`` (B, N, C) with the reference tokens behind them (B, N + rows·columns, C), rows and columns.

        Raises:
            ValueError: The references differ in size, so they cannot share a forward.
        """
        grids = {tuple(grid) for grid in self.reference_grid.tolist()}
        if len(grids) > 1:
            raise ValueError(
                f"reference images of {sorted(grids)} tokens cannot share a forward: group samples by policy.batch_key"
            )
        ((rows, columns),) = grids
        return torch.cat([latents, self.reference[:, : rows * columns].to(latents.dtype)], dim=1), rows, columns


class ReferenceImagePolicy(DiffusersPolicy):
    """A pipeline that edits a reference image.

    A reference keeps its shape and is encoded at the area of the generated image: training small costs little, and where
    both have one shape their tokens lie on one grid. (The pipelines alone always use about a megapixel.)
    """

    edits_images = True

    def __init__(self, pipeline, **options) -> None:
        super().__init__(pipeline, **options)
        self._latents = TensorCache(CACHE_BYTES)
        self._logged: set[tuple] = set()

    @abstractmethod
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """Height and width of about ``area`` pixels with width / height = ``aspect``, rounded as the pipeline rounds."""

    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        """As in ``Policy``; a change of shape by rounding is logged once."""
        shape = item.height, item.width
        if None in shape:
            image = item.image
            shape = image.height, image.width
        size = self.fit_area(resolution**2, shape[1] / shape[0])
        self._log_resize("item of %dx%d is generated at %dx%d (multiple of %d)", shape, size)
        return size

    def reference_size(self, item: Item) -> tuple[int, int]:
        """Height and width at which the reference image of ``item`` is encoded.

        The area of the item's size in the shape of the image, rounded; but the item's own size where that distorts the
        image no more than rounding does. For an item without a size, the image's own area.
        """
        image, own = item.image, (item.height, item.width)
        aspect = image.width / image.height
        if None in own:
            return self.fit_area(image.width * image.height, aspect)
        fitted = self.fit_area(own[0] * own[1], aspect)
        return min(own, fitted, key=lambda size: abs(math.log(size[1] / size[0] / aspect)))

    def batch_key(self, item: Item) -> Hashable:
        """The size of the generated image and the size of the reference."""
        return item.height, item.width, *self.reference_size(item)

    def _read(self, item: Item) -> Reference:
        image = item.image
        if image is None:
            raise ValueError(f"item {item.item_id} has no reference image, but {self.family} edits one")
        size = self.reference_size(dataclasses.replace(item, image=image))  # so that a lazy image is read once
        self._log_resize(
            "reference image of %dx%d is read at %dx%d (multiple of %d)", (image.height, image.width), size
        )
        resized = self.pipeline.image_processor.resize(image.convert("RGB"), *size)
        return Reference(resized, (hashlib.blake2b(resized.tobytes(), digest_size=16).digest(), size))

    def _encode_references(self, references: Sequence[Reference]) -> dict[str, torch.Tensor]:
        """The fields of ``ReferenceConditioning``; each image goes through the VAE once, alone."""
        with self.encoders_held():
            tokens = [self._latents.get(r.key, lambda r=r: (self._encode_image(r),))[0] for r in references]
        grids = [self._grid(*reference.size) for reference in references]
        return {
            "reference": pad_sequence(tokens, batch_first=True).to(self.device),
            "reference_grid": torch.tensor(grids),
        }

    def _encode_image(self, reference: Reference) -> torch.Tensor:
        """Packed latents (M, C) of a reference."""
        rows, columns = self._grid(*reference.size)
        pixels = self.pipeline.image_processor.preprocess(reference.image, *reference.size)
        vae = self.pipeline.vae
        with self._offloaded_vae.at_work():
            latents = self.pipeline._encode_vae_image(
                image=self._vae_input(pixels.to(vae.device, vae.dtype)), generator=None
            )
        packed = self.pipeline._pack_latents(latents, 1, latents.shape[1], 2 * rows, 2 * columns)
        return packed[0].to(self.dtype)

    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels (1, 3, H, W) in the shape that the VAE takes."""
        return pixels

    def _log_resize(self, message: str, given: tuple[int, int], size: tuple[int, int]) -> None:
        """One log line for each change of size, however many images it concerns."""
        if given != size and (message, given, size) not in self._logged:
            self._logged.add((message, given, size))
            logger.info(message, *given, *size, self.size_multiple)
