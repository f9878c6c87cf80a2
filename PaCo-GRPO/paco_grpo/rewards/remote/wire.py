"""Messages between a run and a reward service: images and items there, scores back, as JSON with base64 PNG inside."""

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

    def png(image: Image.Image) -> str:
        return base64.b64encode(encode(image)).decode(
            "ascii"
        )  # lossless: remote scores equal local ones

    positions: dict[int, int] = {}
    entries = []
    for item in items:
        if item.item_id not in positions:
            positions[item.item_id] = len(entries)
            entry = {name: getattr(item, name) for name in _FIELDS}
            entries.append(
                entry
                | {"metadata": dict(item.metadata), "images": [png(image) for image in item.images]}
            )
    sent = [
        {"item": positions[item.item_id], "png": png(image)}
        for image, item in zip(images, items, strict=True)
    ]
    return json.dumps({"items": entries, "images": sent}).encode()


def decode_request(body: bytes) -> tuple[list[Image.Image], list[Item]]:
    """The images, and the item of each. Raises WireError: Another form."""
    try:
        message = json.loads(body)
        sent = [entry["images"] for entry in message["items"]] + [
            [entry["png"] for entry in message["images"]]
        ]
        opened = [
            [open_image(base64.b64decode(text, validate=True)) for text in group] for group in sent
        ]
        pixels = sum(image.width * image.height for group in opened for image in group)
        if pixels > MAX_PIXELS:  # before anything is decoded
            raise ValueError(f"the images have {pixels} pixels together; at most {MAX_PIXELS}")
        *references, images = ([to_rgb(image) for image in group] for group in opened)
        items = []
        for entry, shown in zip(message["items"], references, strict=True):
            fields = {name: entry[name] for name in (*_FIELDS, "metadata")}
            items.append(Item(**fields, references=tuple(shown)))
        return images, [items[entry["item"]] for entry in message["images"]]
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        text = f"the body must hold 'items' and 'images' as {__name__} writes them: {type(error).__name__}: {error}"
        raise WireError(text[:500]) from error


def encode_scores(scores: Sequence[float]) -> bytes:
    """A missing score is sent as null."""
    values = [None if math.isnan(score) else float(score) for score in scores]
    return json.dumps({"scores": values}, allow_nan=False).encode()


def decode_scores(body: bytes, count: int) -> list[float]:
    """``count`` scores, missing as NaN. Raises WireError."""
    try:
        scores = [
            math.nan if score is None else float(score) for score in json.loads(body)["scores"]
        ]
        if len(scores) != count:
            raise ValueError(f"expected {count} scores, got {len(scores)}")
        return scores
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(
            f"the answer must hold 'scores': {type(error).__name__}: {error}"[:500]
        ) from error
