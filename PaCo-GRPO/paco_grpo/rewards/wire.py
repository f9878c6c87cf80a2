"""What travels between a run and a reward service: images and items there, scores back; JSON with PNG inside.

Needs Pillow alone, so that a service's environment holds little more than the reward's own package.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image, UnidentifiedImageError

if TYPE_CHECKING:
    from paco_grpo.types import Item


class WireError(ValueError):
    """A message that does not keep to the form; it names the field."""


@dataclass(frozen=True)
class WireItem:
    """An item as a service's reward sees it: the fields of ``paco_grpo.types.Item``."""

    item_id: int
    prompt: str
    height: int | None = None
    width: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image: Image.Image | None = None


def encode_request(images: Sequence[Image.Image], items: Sequence[Item]) -> bytes:
    """One request; an item that occurs several times (k images of a prompt) is sent once, with its reference image."""
    sent: dict[int, int] = {}
    entries = []
    for item in items:
        if item.item_id not in sent:
            sent[item.item_id] = len(entries)
            reference = item.image
            entries.append(
                {
                    "item_id": item.item_id,
                    "prompt": item.prompt,
                    "height": item.height,
                    "width": item.width,
                    "metadata": dict(item.metadata),
                    "image": None if reference is None else _png(reference),
                }
            )
    shown = [{"item": sent[item.item_id], "png": _png(image)} for image, item in zip(images, items, strict=True)]
    return json.dumps({"items": entries, "images": shown}).encode()


def decode_request(body: bytes) -> tuple[list[Image.Image], list[WireItem]]:
    """Images and the item of each.

    Raises:
        WireError: The body does not keep to the form.
    """
    message = _object(body)
    try:
        items = [_item(entry) for entry in message["items"]]
        images = [_image(entry["png"], "images.png") for entry in message["images"]]
        of_images = [items[_index(entry["item"])] for entry in message["images"]]
    except (KeyError, IndexError, TypeError) as error:
        raise WireError(
            f"the body must hold 'items' and 'images' as paco_grpo.rewards.wire writes them: {error!r}"
        ) from error
    return images, of_images


def encode_scores(scores: Sequence[float]) -> bytes:
    """Scores; NaN = missing travels as null."""
    return json.dumps({"scores": [None if math.isnan(score) else float(score) for score in scores]}).encode()


def decode_scores(body: bytes, count: int) -> list[float]:
    """``count`` scores, missing as NaN.

    Raises:
        WireError: Another number of scores, or something that is no number.
    """
    scores = _object(body).get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise WireError(f"expected {count} scores, got {str(scores)[:100]}")
    for score in scores:
        if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
            raise WireError(f"a score must be a number or null, got {score!r}")
    return [math.nan if score is None else float(score) for score in scores]


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"expected a JSON object, got {type(message).__name__}")
    return message


def _item(entry: Mapping[str, Any]) -> WireItem:
    if not isinstance(entry["prompt"], str) or not isinstance(entry.get("metadata", {}), dict):
        raise WireError("an item needs a text 'prompt' and an object 'metadata'")
    reference = entry.get("image")
    return WireItem(
        item_id=_index(entry["item_id"]),
        prompt=entry["prompt"],
        height=entry.get("height"),
        width=entry.get("width"),
        metadata=entry.get("metadata", {}),
        image=None if reference is None else _image(reference, "items.image"),
    )


def _index(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise WireError(f"item numbers are integers from 0 on, got {value!r}")
    return value


def _png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)  # lossless: remote scores equal local ones
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def _image(text: Any, name: str) -> Image.Image:
    try:
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as image:
            return image.convert("RGB")
    except (
        binascii.Error,
        TypeError,
        ValueError,
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
    ) as error:
        raise WireError(f"field {name} is not a PNG in base64: {error}") from error
