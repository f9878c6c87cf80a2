"""Reference images of the policies that edit: their size, latents, and batches."""

import itertools
import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from paco_grpo.policies.base import PolicySettings
from paco_grpo.policies.diffusers_policy import (
    CACHE_BYTES,
    DiffusersPolicy,
    ForwardInputs,
    TextConditioning,
    image_digest,
)
from paco_grpo.policies.memory import TensorCache
from paco_grpo.types import Item


@dataclass(frozen=True)
class Reference:
    """A reference image as the VAE sees it."""

    image: Image.Image  # RGB
    original: Image.Image  # RGB, before it was resized

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image.height, self.image.width


@dataclass(kw_only=True)
class ReferenceConditioning(TextConditioning):
    """Also the packed latents of each sample's reference images, one after the other."""

    # (B, M, C) in the policy's dtype; padding behind a row's own tokens is never used
    reference: torch.Tensor
    # (B, R, 2) int64, rows and columns of each, 0 behind a row's last; on the CPU, where reading
    # does not synchronize
    reference_grid: torch.Tensor


class ReferenceImagePolicy(DiffusersPolicy):
    """A pipeline that edits a reference image, or several.

    A reference keeps its shape and is encoded at the area of the generated image, so training small
    costs little. (The pipelines alone always use about a megapixel.)
    """

    edits_images = needs_image = True
    # Index of the reference image that gives an edited image its shape.
    shape_from: ClassVar[int] = 0
    size_step: int  # pixels; sides of an edited image are multiples of it
    # The pipeline scales larger references down to this number of pixels.
    largest_reference: ClassVar[float] = math.inf

    def __init__(self, pipeline: DiffusionPipeline, settings: PolicySettings) -> None:
        super().__init__(pipeline, settings)
        self.size_step = self.size_multiple
        self._latents = TensorCache(CACHE_BYTES)

    @abstractmethod
    def fit_area(self, area: float, aspect: float) -> tuple[int, int]:
        """Height and width of ``area`` pixels with width / height = ``aspect``.

        They are rounded as the pipeline rounds.
        """

    def _whole(self, side: float) -> int:
        """``side`` down to a multiple of ``size_multiple``, at least one."""
        return max(int(side) // self.size_multiple, 1) * self.size_multiple

    @override
    def size_like(self, item: Item, resolution: int) -> tuple[int, int]:
        if item.height is None or item.width is None:
            image = item.images[self.shape_from]
            aspect = image.width / image.height
        else:
            aspect = item.width / item.height
        size = self._nearest_size(resolution, aspect)
        if resolution**2 <= self.largest_reference:
            # The reference could not have the size of an image that rounding made larger.
            while math.prod(size) > self.largest_reference:
                resolution -= 1
                size = self._nearest_size(resolution, aspect)
        return size

    def _nearest_size(self, resolution: int, aspect: float) -> tuple[int, int]:
        """Of the sizes around the exact one, the nearest in aspect, then in area."""
        heights = self._steps_around(resolution / math.sqrt(aspect))
        widths = self._steps_around(resolution * math.sqrt(aspect))

        def distance(size: tuple[int, int]) -> tuple[float, float]:
            return _distortion(size, aspect), abs(math.log(math.prod(size) / resolution**2))

        return min(itertools.product(heights, widths), key=distance)

    def _steps_around(self, side: float) -> tuple[int, int]:
        """``side`` rounded down and up to ``size_step``, at least one step."""
        lower = max(int(side) // self.size_step, 1) * self.size_step
        return lower, lower + self.size_step

    def has_its_shape(self, image: Image.Image, item: Item) -> bool:
        """Whether ``_nearest_size`` may have made the size of ``item`` from the shape of ``image``.

        Then both have the same grid of tokens: otherwise the edit would be shifted or stretched
        against the image.
        """
        if item.height is None or item.width is None:
            return False
        size = item.height, item.width
        if math.prod(size) > self.largest_reference:
            return False
        shorter = max(min(size) - self.size_step, self.size_step)
        half_a_step = 0.5 * math.log(min(size) / shorter)
        return _distortion(size, image.width / image.height) <= half_a_step + 1e-9

    def reference_size(self, image: Image.Image, item: Item) -> tuple[int, int]:
        """Height and width at which ``image``, a reference image of ``item``, is encoded.

        The item's own size if it has the image's shape; else its area in the image's shape, rounded
        as in the pipeline. For an item without a size, the image's own area.
        """
        if self.has_its_shape(image, item):
            return item.height, item.width
        if item.height is None or item.width is None:
            area = image.height * image.width
        else:
            area = item.height * item.width
        return self.fit_area(area, image.width / image.height)

    @override
    def batch_key(self, item: Item) -> Hashable:
        """The size of the generated image and the sizes of the references, in order."""
        return item.height, item.width, *(self.reference_size(image, item) for image in item.images)

    @torch.no_grad()
    @override
    def encode(
        self, items: Sequence[Item], text_tokens: int | None = None
    ) -> ReferenceConditioning:
        references = [self._read(item) for item in items]
        texts = self._encode_texts(items, [self._seen(row) for row in references], text_tokens)
        return ReferenceConditioning(**texts, **self._encode_references(references))

    def _seen(self, references: Sequence[Reference]) -> Sequence[Image.Image]:
        """The images that the text encoder sees."""
        return ()

    @override
    def _tokens(self, inputs: ForwardInputs) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """With the reference tokens behind the generated ones."""
        conditioning = inputs.conditioning
        grids = set()
        for sample in conditioning.reference_grid.tolist():
            grids.add(tuple((rows, columns) for rows, columns in sample if rows))
        if len(grids) > 1:
            raise ValueError(
                f"reference images of {sorted(grids)} tokens cannot share a forward: group "
                "samples by policy.batch_key"
            )
        (shared,) = grids
        length = sum(rows * columns for rows, columns in shared)
        references = conditioning.reference[:, :length].to(inputs.latents.dtype)
        tokens = torch.cat([inputs.latents, references], dim=1)
        return tokens, [self._grid(inputs.height, inputs.width), *shared]

    def _read(self, item: Item) -> tuple[Reference, ...]:
        references = []
        for image in item.images:
            original = image.convert("RGB")
            references.append(Reference(self._resize(original, item), original))
        return tuple(references)

    def _resize(self, image: Image.Image, item: Item) -> Image.Image:
        """``image`` at its ``reference_size``."""
        return self.pipeline.image_processor.resize(image, *self.reference_size(image, item))

    def _encode_references(
        self, references: Sequence[Sequence[Reference]]
    ) -> dict[str, torch.Tensor]:
        """The fields of ``ReferenceConditioning``; each image goes through the VAE alone."""
        nothing = torch.zeros(0, self._transformer_config.in_channels, dtype=self.dtype)
        tokens = []
        grids = []
        # One transfer of the VAE for all images that are not cached
        with ExitStack() as copied:

            def compute(reference: Reference) -> tuple[torch.Tensor]:
                copied.enter_context(self._offloaded_vae.on_device())
                return (self._encode_image(reference),)

            for row in references:
                parts = [nothing]
                for reference in row:
                    digest = image_digest(reference.image)
                    (latents,) = self._latents.get(digest, partial(compute, reference))
                    parts.append(latents)
                tokens.append(torch.cat(parts))
                grid = [self._grid(*reference.size) for reference in row]
                grids.append(torch.tensor(grid, dtype=torch.int64).view(-1, 2))
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

    @override
    def pipeline_arguments(self, item: Item) -> dict[str, Any]:
        """With the references as they are encoded."""
        images = [reference.image for reference in self._read(item)]
        return super().pipeline_arguments(item) | {"image": images or None}

    def _vae_input(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels (1, 3, H, W) in the shape that the VAE takes."""
        return pixels


def _distortion(size: tuple[int, int], aspect: float) -> float:
    """How far ``size`` (height, width) is from width / height = ``aspect``, as a logarithm."""
    height, width = size
    return abs(math.log(width / height / aspect))
