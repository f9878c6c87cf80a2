"""Reference images of the policies that edit: their size, their latents, and which samples may share a forward."""

import hashlib
import logging
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from paco_grpo.policies.diffusers_policy import (
    CACHE_BYTES,
    DiffusersPolicy,
    EncoderImages,
    ForwardInputs,
    TextConditioning,
)
from paco_grpo.policies.performance.cache import TensorCache
from paco_grpo.types import Item

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """A reference image as the VAE sees it."""

    image: Image.Image  # RGB
    original: Image.Image  # RGB, before it was resized
    key: Hashable  # of content and size: two files with the same picture are one

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.height, self.image.width


@dataclass(kw_only=True)
class ReferenceConditioning(TextConditioning):
    """Also packed latents of each sample's reference images, one after the other, padded to the longest row."""

    reference: torch.Tensor  # (B, M, C) in the policy's dtype; padding behind a row's own tokens is never used
    # (B, R, 2) int64, rows and columns of each, 0 behind a row's last; on the CPU, where reading does not synchronize
    reference_grid: torch.Tensor

    def with_references(self, latents: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """``latents`` (B, N, C) with the reference tokens behind them (B, N + M', C), and each image's rows and columns.

        Raises:
            ValueError: The references differ in number or size, so they cannot share a forward.
        """
        grids = {tuple((r, c) for r, c in row if r) for row in self.reference_grid.tolist()}
        if len(grids) > 1:
            raise ValueError(
                f"reference images of {sorted(grids)} tokens cannot share a forward: group samples by policy.batch_key"
            )
        (shared,) = grids
        length = sum(rows * columns for rows, columns in shared)
        return torch.cat([latents, self.reference[:, :length].to(latents.dtype)], dim=1), list(shared)


class ReferenceImagePolicy(DiffusersPolicy):
    """A pipeline that edits a reference image, or several.

    A reference keeps its shape and is encoded at the area of the generated image: training small costs little, and where
    both have one shape their tokens lie on one grid. (The pipelines alone always use about a megapixel.)
    """

    edits_images = needs_image = True
    shape_from: ClassVar[int] = 0  # index of the reference image that gives an edited image its shape

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
            image = item.images[self.shape_from]
            shape = image.height, image.width
        size = self.fit_area(resolution**2, shape[1] / shape[0])
        self._log_resize("item of %dx%d is generated at %dx%d (multiple of %d)", shape, size)
        return size

    def reference_size(self, image: Image.Image, item: Item) -> tuple[int, int]:
        """Height and width at which ``image``, a reference image of ``item``, is encoded.

        The area of the item's size in the shape of the image, rounded; but the item's own size where that distorts the
        image no more than rounding does. For an item without a size, the image's own area.
        """
        own = item.height, item.width
        aspect = image.width / image.height
        if None in own:
            return self.fit_area(image.width * image.height, aspect)
        fitted = self.fit_area(own[0] * own[1], aspect)
        return min(own, fitted, key=lambda size: abs(math.log(size[1] / size[0] / aspect)))

    def batch_key(self, item: Item) -> Hashable:
        """The size of the generated image and the sizes of the references, in order."""
        return item.height, item.width, *(self.reference_size(image, item) for image in item.images)

    @torch.no_grad()
    def encode(self, items: Sequence[Item]) -> ReferenceConditioning:
        """As in ``Policy``; each text and each reference image goes through its encoder once, alone."""
        references = [self._read(item) for item in items]
        texts = self._encode_texts(items, [self._seen(row) for row in references])
        return ReferenceConditioning(**texts, **self._encode_references(references))

    def _seen(self, references: tuple[Reference, ...]) -> EncoderImages:
        """The images that the text encoder sees."""
        return EncoderImages()

    def _tokens(self, inputs: ForwardInputs) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        tokens, grids = inputs.conditioning.with_references(inputs.latents)
        return tokens, [self._grid(inputs.height, inputs.width), *grids]

    def _read(self, item: Item) -> tuple[Reference, ...]:
        images = item.images
        if self.needs_image and not images:
            raise ValueError(f"item {item.item_id} has no reference image, but {self.family} edits one")
        if len(images) > 1 and not self.several_images:
            raise ValueError(f"item {item.item_id} has {len(images)} reference images, but {self.family} edits one")
        return tuple(self._resized(image.convert("RGB"), item) for image in images)

    def _resized(self, image: Image.Image, item: Item) -> Reference:
        size = self.reference_size(image, item)
        self._log_resize(
            "reference image of %dx%d is read at %dx%d (multiple of %d)", (image.height, image.width), size
        )
        resized = self._resize(image, item)
        return Reference(resized, image, (image_digest(resized), size))

    def _resize(self, image: Image.Image, item: Item) -> Image.Image:
        """``image`` at its ``reference_size``."""
        return self.pipeline.image_processor.resize(image, *self.reference_size(image, item))

    def _encode_references(self, references: Sequence[Sequence[Reference]]) -> dict[str, torch.Tensor]:
        """The fields of ``ReferenceConditioning``; each image goes through the VAE once, alone."""
        nothing = torch.zeros(0, self._transformer_config.in_channels, dtype=self.dtype)
        with ExitStack() as copied:  # one transfer of the VAE for all images that are not cached

            def compute(reference: Reference) -> tuple[torch.Tensor]:
                copied.enter_context(self._offloaded_vae.on_device())
                return (self._encode_image(reference),)

            tokens = [
                torch.cat([nothing, *(self._latents.get(r.key, partial(compute, r))[0] for r in row)]) for row in references
            ]
        grids = [torch.tensor([self._grid(*r.size) for r in row], dtype=torch.int64).view(-1, 2) for row in references]
        return {
            "reference": pad_sequence(tokens, batch_first=True).to(self.device),
            "reference_grid": pad_sequence(grids, batch_first=True),
        }

    def _encode_image(self, reference: Reference) -> torch.Tensor:
        """Packed latents (M, C) of a reference."""
        pixels = self.pipeline.image_processor.preprocess(reference.image, *reference.size)
        pixels = self._vae_input(pixels.to(self.pipeline.vae.device, self.pipeline.vae.dtype))
        latents = self.pipeline._encode_vae_image(image=pixels, generator=None)
        return self._pack(latents)[0].to(self.dtype)

    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels (1, 3, H, W) in the shape that the VAE takes."""
        return pixels

    def _log_resize(self, message: str, given: tuple[int, int], size: tuple[int, int]) -> None:
        """One log line for each change of size, however many images it concerns."""
        if given != size and (message, given, size) not in self._logged:
            self._logged.add((message, given, size))
            logger.info(message, *given, *size, self.size_multiple)


def image_digest(image: Image.Image) -> bytes:
    """A short name of the pixels, for caches."""
    return hashlib.blake2b(image.tobytes(), digest_size=16).digest()
