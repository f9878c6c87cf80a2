"""Messages between a run and a reward service: JSON with images as base64 PNG, scores back.

``decode_compute`` and ``encode_rewards`` are the form in which Flow-Factory asks.
"""

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

from PIL import Image

from paco_grpo.item import Item
from paco_judge.images import encode, read_image

_FIELDS = ("item_id", "prompt", "height", "width", "dataset")


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


def _from_png(text: str) -> Image.Image:
    return read_image(base64.b64decode(text, validate=True))


def decode_request(body: bytes) -> tuple[list[Image.Image], list[Item]]:
    """The images, and the item of each."""
    message = json.loads(body)
    items = []
    for entry in message["items"]:
        fields = {name: entry[name] for name in (*_FIELDS, "metadata")}
        references = tuple(_from_png(text) for text in entry["images"])
        items.append(Item(**fields, references=references))
    images = []
    item_of_image = []
    for entry in message["images"]:
        images.append(_from_png(entry["png"]))
        item_of_image.append(items[entry["item"]])
    return images, item_of_image


def encode_scores(scores: Sequence[float]) -> bytes:
    """A missing score is sent as null."""
    values = [None if math.isnan(score) else float(score) for score in scores]
    return json.dumps({"scores": values}, allow_nan=False).encode()


def decode_scores(body: bytes, count: int) -> list[float]:
    """``count`` scores, missing as NaN. Raises ValueError: They are others, or no numbers."""
    message = json.loads(body)
    scores: Any = message.get("scores") if isinstance(message, dict) else None
    kinds = set(map(type, scores)) if isinstance(scores, list) else {None}
    if not kinds <= {int, float, type(None)}:  # true is no number
        raise ValueError(f"its scores are no list of numbers or null: {str(message)[:200]}")
    if len(scores) != count:
        raise ValueError(f"it gave {len(scores)} scores for {count} images")
    return [math.nan if score is None else float(score) for score in scores]


def decode_compute(body: bytes) -> tuple[list[Image.Image], list[Item]]:
    """Flow-Factory's request: one image, prompt and list of reference images for each score."""
    message = json.loads(body)
    if not message.get("image"):
        raise ValueError("the request has no images; videos are not scored")
    for name in ("image", "prompt"):
        if type(message.get(name)) is not list:  # a text would be read letter by letter
            raise ValueError(f"{name!r} must be a list, one for each image")
    images = [_from_png(text) for text in message["image"]]
    references = message.get("condition_images") or [[]] * len(images)
    if any(type(of_item) is not list for of_item in references):
        raise ValueError("'condition_images' must be a list of images for each image")
    items = []
    for prompt, of_item in zip(message["prompt"], references, strict=True):
        pictures = tuple(_from_png(text) for text in of_item)
        items.append(Item(len(items), prompt, references=pictures))
    return images, items


def encode_rewards(scores: Sequence[float]) -> bytes:
    """Its answer. Raises ValueError: A score is missing, which the format cannot say."""
    missing = sum(map(math.isnan, scores))
    if missing:
        raise ValueError(f"{missing} of {len(scores)} images have no score; the log says why")
    return json.dumps({"rewards": list(map(float, scores))}).encode()
