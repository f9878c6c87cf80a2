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


def encode_request(images: Sequence[Image.Image], items: Sequence[Item]) -> bytes:
    """One request; an item that occurs several times (k images of a prompt) is sent once, with its reference image."""
    positions: dict[int, int] = {}
    entries = []
    for item in items:
        if item.item_id not in positions:
            positions[item.item_id] = len(entries)
            reference = item.image
            entry = {name: getattr(item, name) for name in ("item_id", "prompt", "height", "width")}
            entry |= {"metadata": dict(item.metadata), "image": None if reference is None else _encode(reference)}
            entries.append(entry)
    sent = [{"item": positions[item.item_id], "png": _encode(image)} for image, item in zip(images, items, strict=True)]
    return json.dumps({"items": entries, "images": sent}).encode()


def decode_request(body: bytes) -> tuple[list[Image.Image], list[WireItem]]:
    """The images, and the item of each.

    Raises:
        WireError: The body does not have the form that ``encode_request`` gives it.
    """
    try:
        message = json.loads(body)
        items = []
        for entry in message["items"]:
            if not isinstance(entry["prompt"], str) or not isinstance(entry.get("metadata", {}), dict):
                raise TypeError("an item needs a text 'prompt' and an object 'metadata'")
            reference = entry.get("image")
            items.append(WireItem(**entry | {"image": None if reference is None else _decode(reference)}))
        images = [_decode(entry["png"]) for entry in message["images"]]
        return images, [items[entry["item"]] for entry in message["images"]]
    except (LookupError, TypeError, ValueError, OSError, RecursionError, Image.DecompressionBombError) as error:
        raise WireError(f"the body must hold 'items' and 'images' as {__name__} writes them: {error!r}") from error


def encode_scores(scores: Sequence[float]) -> bytes:
    """Scores; NaN = missing is sent as null."""
    return json.dumps({"scores": [None if math.isnan(score) else float(score) for score in scores]}).encode()


def decode_scores(body: bytes, count: int) -> list[float]:
    """``count`` scores, missing as NaN.

    Raises:
        WireError: Another number of scores, or one that is not a number.
    """
    try:
        scores = json.loads(body)["scores"]
        if len(scores) != count or any(type(score) not in (int, float, type(None)) for score in scores):
            raise ValueError(f"expected {count} scores (numbers or null), got {str(scores)[:100]}")
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"the answer must hold 'scores': {error!r}") from error
    return [math.nan if score is None else float(score) for score in scores]


def _encode(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG", compress_level=1)  # lossless: remote scores equal local ones
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def _decode(text: str) -> Image.Image:
    with Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"]) as image:
        return image.convert("RGB")
