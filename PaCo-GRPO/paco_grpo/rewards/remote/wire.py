"""Messages between a run and a reward service: images and items there, scores back, as JSON with base64 PNG inside.

Needs Pillow alone, so that a service's environment holds little more than the reward's own package.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from paco_judge.images import encode, open_image, to_rgb

if TYPE_CHECKING:
    from paco_grpo.types import Item

MAX_PIXELS = 1 << 27  # of all images of a request: 16 of 2048x2048 and as many references


class WireError(ValueError):
    """A message that does not have the expected form."""


@dataclass(frozen=True)
class WireItem:
    """An item as a service's reward sees it: the fields of ``paco_grpo.types.Item``, which needs torch."""

    item_id: int
    prompt: str
    height: int | None = None
    width: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image: Image.Image | None = None
    more_images: tuple[Image.Image, ...] = ()

    @property
    def images(self) -> tuple[Image.Image, ...]:
        """All reference images, in order."""
        return () if self.image is None else (self.image, *self.more_images)


def encode_request(images: Sequence[Image.Image], items: Sequence[Item]) -> bytes:
    """One request; an item that occurs several times (k images of a prompt) is sent once, with its reference images."""
    positions: dict[int, int] = {}
    entries = []
    for item in items:
        if item.item_id not in positions:
            positions[item.item_id] = len(entries)
            entry = {name: getattr(item, name) for name in ("item_id", "prompt", "height", "width")}
            entries.append(entry | {"metadata": dict(item.metadata), "images": [_encode(image) for image in item.images]})
    sent = [{"item": positions[item.item_id], "png": _encode(image)} for image, item in zip(images, items, strict=True)]
    return json.dumps({"items": entries, "images": sent}).encode()


def decode_request(body: bytes) -> tuple[list[Image.Image], list[WireItem]]:
    """The images, and the item of each.

    Raises:
        WireError: The body does not have the form that ``encode_request`` gives it.
    """
    try:
        message = json.loads(body)
        opened = [[_open(text) for text in entry["images"]] for entry in message["items"]]
        opened.append([_open(entry["png"]) for entry in message["images"]])
        pixels = sum(image.width * image.height for group in opened for image in group)
        if pixels > MAX_PIXELS:  # before anything is decoded
            raise ValueError(f"the images have {pixels} pixels together; at most {MAX_PIXELS}")
        *references, images = ([to_rgb(image) for image in group] for group in opened)
        items = []
        for entry, (first, *more) in zip(message["items"], (group or [None] for group in references), strict=True):
            del entry["images"]
            items.append(WireItem(**entry, image=first, more_images=tuple(more)))
        return images, [items[entry["item"]] for entry in message["images"]]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        text = f"the body must hold 'items' and 'images' as {__name__} writes them: {type(error).__name__}: {error}"
        raise WireError(text[:500]) from error


def encode_scores(scores: Sequence[float]) -> bytes:
    """Scores; NaN = missing is sent as null."""
    values = [None if math.isnan(score) else float(score) for score in scores]
    return json.dumps({"scores": values}, allow_nan=False).encode()


def decode_scores(body: bytes, count: int) -> list[float]:
    """``count`` scores, missing as NaN.

    Raises:
        WireError: Another number of scores, or one that is not a number.
    """
    try:
        scores = [math.nan if score is None else float(score) for score in json.loads(body)["scores"]]
        if len(scores) != count:
            raise ValueError(f"expected {count} scores, got {len(scores)}")
        return scores
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"the answer must hold 'scores': {type(error).__name__}: {error}"[:500]) from error


def _encode(image: Image.Image) -> str:
    return base64.b64encode(encode(image)).decode("ascii")  # lossless: remote scores equal local ones


def _open(text: str) -> Image.Image:
    return open_image(base64.b64decode(text, validate=True))
