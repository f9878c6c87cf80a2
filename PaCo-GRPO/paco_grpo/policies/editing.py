"""What the two editors share: the size, latents and grouping of reference images."""

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

from paco_grpo.policies.cache import TensorCache
from paco_grpo.policies.pipeline import CACHE_BYTES, PipelinePolicy
from paco_grpo.types import Conditioning, Item

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """A reference image as the encoders see it."""

    image: Image.Image  # RGB
    key: Hashable  # of its content and size: two files with the same picture are one

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.height, self.image.width


@dataclass
class ReferenceConditioning(Conditioning):
    """Packed latents of each sample's reference image, padded to the longest."""

    reference: torch.Tensor  # (B, M, C) in the policy's dtype; what lies behind a row's own tokens is never used
    reference_grid: torch.Tensor  # (B, 2) int64, rows and columns of each; on the CPU, so that reading it is no waiting

    def reference_tokens(self) -> tuple[torch.Tensor, int, int]:
        """Reference tokens (B, rows·columns, C), rows and columns.

        Raises:
            ValueError: The references differ in size, so they cannot share a forward.
        """
        grids = {tuple(grid) for grid in self.reference_grid.tolist()}
        if len(grids) > 1:
            raise ValueError(
                f"reference images of {sorted(grids)} tokens cannot share a forward: group samples by policy.batch_key"
            )
        ((rows, columns),) = grids
        return self.reference[:, : rows * columns], rows, columns


class EditingPolicy(PipelinePolicy):
    """A pipeline that changes a reference image.

    A reference is encoded at the area of the image that is drawn, with its own shape: training small costs little, and
    where both have one shape their tokens lie on one grid. (The pipelines alone always take about a megapixel.)
    """

    edits_images = True

    def __init__(self, pipeline, **options) -> None:
        """See :meth:`PipelinePolicy.__init__`."""
        super().__init__(pipeline, **options)
        self._latents = TensorCache(CACHE_BYTES)
        self._logged: set[tuple] = set()

    @abstractmethod
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """Height and width of about ``area`` pixels with width / height = ``aspect``, rounded as the pipeline rounds."""

    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        """See :meth:`Policy.size_like`; rounded by :meth:`fit_area`."""
        shape = item.height, item.width
        if None in shape:
            image = item.image
            shape = image.height, image.width
        size = self.fit_area(resolution**2, shape[1] / shape[0])
        self._say("item", shape, "drawn", size)
        return size

    def reference_size(self, item: Item) -> tuple[int, int]:
        """Height and width at which the reference image of ``item`` is encoded.

        The area of the item's size in the shape of the image, rounded; but the item's own size where that distorts the
        image no more than the rounding does. An item without a size has its image taken at the image's own area.
        """
        image, own = item.image, (item.height, item.width)
        aspect = image.width / image.height
        if None in own:
            return self.fit_area(image.width * image.height, aspect)
        fitted = self.fit_area(own[0] * own[1], aspect)
        return min(own, fitted, key=lambda size: abs(math.log(size[1] / size[0] / aspect)))

    def batch_key(self, item: Item) -> Hashable:
        """See :meth:`Policy.batch_key`: the size drawn and the size of the reference."""
        return item.height, item.width, *self.reference_size(item)

    def _read(self, item: Item) -> Reference:
        """The reference of ``item``.

        Raises:
            ValueError: It has none.
        """
        image = item.image
        if image is None:
            raise ValueError(f"item {item.item_id} has no reference image, but {self.family} edits one")
        size = self.reference_size(dataclasses.replace(item, image=image))
        self._say("reference image", (image.height, image.width), "read", size)
        resized = self.pipeline.image_processor.resize(image.convert("RGB"), *size)
        return Reference(resized, (hashlib.blake2b(resized.tobytes(), digest_size=16).digest(), size))

    def _encode_references(self, references: Sequence[Reference]) -> dict[str, torch.Tensor]:
        """The fields of :class:`ReferenceConditioning`; each picture goes through the VAE once, alone."""
        with self.encoders_held():
            tokens = [self._latents.get(r.key, lambda r=r: (self._encode_one(r),))[0] for r in references]
        grids = [self._grid(*reference.size) for reference in references]
        return {
            "reference": pad_sequence(tokens, batch_first=True).to(self.device),
            "reference_grid": torch.tensor(grids),
        }

    def _encode_one(self, reference: Reference) -> torch.Tensor:
        """Packed latents (M, C) of a reference."""
        rows, columns = self._grid(*reference.size)
        pixels = self.pipeline.image_processor.preprocess(reference.image, *reference.size)
        vae = self.pipeline.vae
        with self.vae_at_work():
            latents = self.pipeline._encode_vae_image(
                image=self._vae_input(pixels.to(vae.device, vae.dtype)), generator=None
            )
        packed = self.pipeline._pack_latents(latents, 1, latents.shape[1], 2 * rows, 2 * columns)
        return packed[0].to(self.dtype)

    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels (1, 3, H, W) in the shape that the VAE takes."""
        return pixels

    def _say(self, thing: str, given: tuple[int, int], done: str, size: tuple[int, int]) -> None:
        """One log line for each change of size, however many images it concerns."""
        if given != size and (thing, given, size) not in self._logged:
            self._logged.add((thing, given, size))
            logger.info("%s of %dx%d is %s at %dx%d (multiple of %d)", thing, *given, done, *size, self.size_multiple)
