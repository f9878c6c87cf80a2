"""What travels to a reward service arrives as it was, and what is no such message is refused by field."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.rewards.wire import WireError, decode_request, decode_scores, encode_request, encode_scores
from paco_grpo.types import Item


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8))


def test_images_and_items_arrive_and_an_item_is_sent_once():
    read = []
    items = [
        Item(4, 'say "é"', 64, 32, metadata={"criteria": {"Style": {"a": None}}, "idx": "x"}),
        Item(2, "edit", image=lambda: read.append(1) or picture(9)),
        Item(4, 'say "é"', 64, 32, metadata={"criteria": {"Style": {"a": None}}, "idx": "x"}),
        Item(2, "edit", image=picture(9)),
    ]
    body = encode_request([picture(i) for i in range(4)], items)
    assert len(json.loads(body)["items"]) == 2 and len(read) == 1
    images, arrived = decode_request(body)
    for i, (image, item, before) in enumerate(zip(images, arrived, items, strict=True)):
        assert np.array_equal(image, picture(i))
        assert (item.item_id, item.prompt, item.height, item.width, item.metadata) == (
            before.item_id, before.prompt, before.height, before.width, before.metadata
        )  # fmt: skip
        assert (item.image is None) == (before.item_id == 4)
    assert np.array_equal(arrived[1].image, picture(9))


@given(st.lists(st.one_of(st.just(math.nan), st.floats(allow_nan=False, allow_infinity=False)), max_size=5))
def test_scores_come_back_exactly_and_missing_as_missing(scores):
    assert np.array_equal(decode_scores(encode_scores(scores), len(scores)), scores, equal_nan=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"x", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "must hold 'items' and 'images'"),
        (b'{"items": [{"item_id": 0, "prompt": 3}], "images": []}', "text 'prompt'"),
        (b'{"items": [{"item_id": -1, "prompt": ""}], "images": []}', "item numbers"),
        (b'{"items": [{"item_id": 0, "prompt": ""}], "images": [{"item": 1, "png": "AA=="}]}', "not a PNG"),
        (b'{"items": [{"item_id": 0, "prompt": ""}], "images": [{"item": 0, "png": "\u00e9"}]}', "images.png"),
        (b'{"items": [{"item_id": 0, "prompt": "", "image": 3}], "images": []}', "items.image"),
    ],
)
def test_requests_that_are_none(body, said):
    with pytest.raises(WireError, match=said):
        decode_request(body)


@pytest.mark.parametrize("body", [b'{"scores": [1]}', b'{"scores": ["1", 2]}', b'{"scores": [true, 2]}', b"{}", b"3"])
def test_answers_that_are_none(body):
    with pytest.raises(WireError):
        decode_scores(body, 2)
