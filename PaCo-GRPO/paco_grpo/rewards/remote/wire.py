"""Messages between a run and a reward service: images and items there, scores back, as JSON with base64 PNG inside.

Needs Pillow alone, so that a service's environment holds little more than the reward's own package.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from paco_grpo.images import check_total, decode, open_image

if TYPE_CHECKING:
    from paco_grpo.types import Item


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
        message = _load(body)
        entries, sent = message["items"], message["images"]
        if not isinstance(entries, list) or not isinstance(sent, list):
            raise TypeError("'items' and 'images' must be lists")
        opened = [[_open(text) for text in [*entry["images"]]] for entry in entries]
        opened.append([_open(entry["png"]) for entry in sent])
        check_total([image for group in opened for image in group])  # before anything is decoded
        *references, images = ([decode(image) for image in group] for group in opened)
        items = [_item(entry, group) for entry, group in zip(entries, references, strict=True)]
        places = [entry["item"] for entry in sent]
        if any(type(place) is not int or not 0 <= place < len(items) for place in places):
            raise TypeError(f"'item' is not one of the {len(items)} items")
        return images, [items[place] for place in places]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        text = f"the body must hold 'items' and 'images' as {__name__} writes them: {type(error).__name__}: {error}"
        raise WireError(text[:500]) from error


def _item(entry: Mapping[str, Any], images: Sequence[Image.Image]) -> WireItem:
    first, *more = images or [None]
    fields = {name: value for name, value in entry.items() if name != "images"}
    item = WireItem(**fields, image=first, more_images=tuple(more))
    if type(item.item_id) is not int or any(type(size) not in (int, type(None)) for size in (item.height, item.width)):
        raise TypeError("an item needs a whole number 'item_id', and 'height' and 'width' or null")
    if not isinstance(item.prompt, str) or not isinstance(item.metadata, dict):
        raise TypeError("an item needs a text 'prompt' and an object 'metadata'")
    return item


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
        scores = _load(body)["scores"]
        if len(scores) != count or any(type(score) not in (int, float, type(None)) for score in scores):
            raise ValueError(f"expected {count} scores (numbers or null), got {str(scores)[:100]}")
        return [math.nan if score is None else float(score) for score in scores]
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"the answer must hold 'scores': {type(error).__name__}: {error}"[:500]) from error


def _load(body: bytes) -> Any:
    """JSON in UTF-8 as the standard has it. Raises ValueError or RecursionError."""

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(body.decode(), parse_constant=no_constant)


def _encode(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)  # lossless: remote scores equal local ones
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def _open(text: Any) -> Image.Image:
    return open_image(base64.b64decode(text, validate=True), formats=("PNG",))
