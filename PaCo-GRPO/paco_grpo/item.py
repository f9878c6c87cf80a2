"""An entry of a prompt set. No torch here: the environment of a reward service need not have it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from PIL import Image

Reference = Image.Image | Callable[[], Image.Image]


@dataclass(frozen=True)
class Item:
    """A prompt, or an instruction with the images that it edits."""

    # Position among the items of all prompt sets of the run. Groups are formed by it, never by
    # text: two items may share a prompt.
    item_id: int
    prompt: str
    height: int | None = None  # requested pixels, None = the configured resolution
    width: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the row it was read from
    # Reference images of an editing item (RGB), in order, or functions that read them: 46,000
    # images do not fit in memory, and PIL keeps the pixels of an image once they are read.
    references: tuple[Reference, ...] = ()
    dataset: int = 0  # number of its prompt set among those of the run, in order of their names
    place: str = field(default="", compare=False)  # file and row, for messages

    @property
    def size(self) -> tuple[int, int]:
        """Height and width. Raises ValueError: it has none (``sampling.images.at_size``)."""
        if self.height is None or self.width is None:
            raise ValueError(f"item {self.item_id} has no size")
        return self.height, self.width

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """The reference images, read at every access unless the item is loaded."""
        return tuple(_read(reference) for reference in self.references)

    @property
    def image(self) -> Image.Image | None:
        """The first reference image."""
        return _read(self.references[0]) if self.references else None

    @cached_property
    def crops(self) -> tuple[Image.Image, ...]:
        """The reference images, each cut to its box if the row's ``reference_boxes`` has one.

        They stay in memory as long as the item, so ask a loaded one.
        """
        boxes = self.metadata.get("reference_boxes") or [None] * self.num_references
        crops = []
        for image, box in zip(self.images, boxes, strict=True):
            crops.append(_cut(image, box) if box else image)
        return tuple(crops)

    @property
    def num_references(self) -> int:
        """Number of reference images; none is read."""
        return len(self.references)

    def load(self) -> Self:
        """The same item with its reference images in memory; keep it only while it is needed."""
        return dataclasses.replace(self, references=self.images)


def _cut(image: Image.Image, box: Sequence[float]) -> Image.Image:
    """The pixels of ``image`` that ``box`` touches, at least one.

    ``box``: left, top, right and bottom in shares of width and height.
    """
    left, top, right, bottom = box
    return image.crop(
        (
            math.floor(left * image.width),
            math.floor(top * image.height),
            math.ceil(right * image.width),
            math.ceil(bottom * image.height),
        )
    )


def _read(reference: Reference) -> Image.Image:
    return reference() if callable(reference) else reference
