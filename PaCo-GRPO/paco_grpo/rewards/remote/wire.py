"""Messages between a run and a reward service: JSON with images as base64 PNG, scores back."""

import base64
import json
import math
from collections.abc import Sequence

from PIL import Image

from paco_grpo.item import Item
from paco_judge.images import encode, open_image, to_rgb

_FIELDS = ("item_id", "prompt", "height", "width")
MAX_PIXELS = 1 << 27  # of all images of a request: 16 of 2048x2048 and as many references


class WireError(ValueError):
    """A message that does not have the expected form."""


def encode_request(images: Sequence[Image.Image], items: Sequence[Item]) -> bytes:
    """One request; an item of several images is sent once."""
    positions: dict[int, int] = {}
    entries = []
    for item in items:
        if item.item_id not in positions:
            positions[item.item_id] = len(entries)
            entry = {name: getattr(item, name) for name in _FIELDS}
            entry["metadata"] = dict(item.metadata)
            entry["images"] = [_to_png(image) for image in item.images]
            entries.append(entry)
    sent = []
    for image, item in zip(images, items, strict=True):
        sent.append({"item": positions[item.item_id], "png": _to_png(image)})
    return json.dumps({"items": entries, "images": sent}).encode()


def _to_png(image: Image.Image) -> str:
    """Lossless, so that remote scores equal local ones."""
    return base64.b64encode(encode(image)).decode("ascii")


def _open_png(text: str) -> Image.Image:
    """The image, not yet decoded."""
    return open_image(base64.b64decode(text, validate=True))


def decode_request(body: bytes) -> tuple[list[Image.Image], list[Item]]:
    """The images, and the item of each. Raises WireError: Another form."""
    try:
        message = json.loads(body)
        images = [_open_png(entry["png"]) for entry in message["images"]]
        references = []  # of each item
        opened = list(images)
        for entry in message["items"]:
            references.append([_open_png(text) for text in entry["images"]])
            opened += references[-1]
        num_pixels = sum(image.width * image.height for image in opened)
        if num_pixels > MAX_PIXELS:  # before anything is decoded
            raise ValueError(f"the images have {num_pixels} pixels together; at most {MAX_PIXELS}")
        items = []
        for entry, of_item in zip(message["items"], references, strict=True):
            fields = {name: entry[name] for name in (*_FIELDS, "metadata")}
            items.append(Item(**fields, references=tuple(to_rgb(image) for image in of_item)))
        item_of_image = [items[entry["item"]] for entry in message["images"]]
        return [to_rgb(image) for image in images], item_of_image
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        text = f"the body must hold 'items' and 'images' as {__name__} writes them: {reason}"
        raise WireError(text[:500]) from error


def encode_scores(scores: Sequence[float]) -> bytes:
    """A missing score is sent as null."""
    values = [None if math.isnan(score) else float(score) for score in scores]
    return json.dumps({"scores": values}, allow_nan=False).encode()


def decode_scores(body: bytes, count: int) -> list[float]:
    """``count`` scores, missing as NaN. Raises WireError."""
    try:
        values = json.loads(body)["scores"]
        scores = [math.nan if value is None else float(value) for value in values]
        if len(scores) != count:
            raise ValueError(f"expected {count} scores, got {len(scores)}")
        return scores
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"the answer must hold 'scores': {type(error).__name__}: {error}"
        raise WireError(text[:500]) from error
