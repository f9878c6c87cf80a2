"""Messages to a reward service arrive unchanged; anything else is refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.rewards.remote.wire import WireError, decode_request, decode_scores, encode_request, encode_scores
from paco_grpo.types import Item


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8))


def test_images_and_items_arrive_and_an_item_is_sent_once():
    read = []
    grid = Item(4, 'say "é"', 64, 32, metadata={"criteria": {"Style": {"a": None}}, "idx": "x"})
    items = [grid, Item(2, "edit", image=lambda: read.append(1) or picture(9)), grid, Item(2, "edit", image=picture(9))]
    body = encode_request([picture(i) for i in range(4)], items)
    assert len(json.loads(body)["items"]) == 2 and len(read) == 1
    images, arrived = decode_request(body)
    for i, (image, item, before) in enumerate(zip(images, arrived, items, strict=True)):
        assert np.array_equal(image, picture(i))
        assert (item.item_id, item.prompt, item.height, item.width, item.metadata) == (
            before.item_id, before.prompt, before.height, before.width, before.metadata
        )  # fmt: skip
        assert (item.image is None) == (before.item_id == 4)
    assert np.array_equal(arrived[1].image, picture(9)) and arrived[1].more_images == () and arrived[0].images == ()


def test_several_reference_images_arrive_in_order():
    items = [Item(2, "edit", image=picture(9), more_images=(picture(8), lambda: picture(7))), Item(3, "edit", image=picture(6))]
    images, arrived = decode_request(encode_request([picture(0), picture(1)], items))
    for item, seeds in zip(arrived, ((9, 8, 7), (6,)), strict=True):
        for image, seed in zip(item.images, seeds, strict=True):
            assert np.array_equal(image, picture(seed))
    assert np.array_equal(images[1], picture(1))


@given(st.lists(st.one_of(st.just(math.nan), st.floats(allow_nan=False, allow_infinity=False)), max_size=5))
def test_scores_come_back_exactly_and_missing_as_missing(scores):
    assert np.array_equal(decode_scores(encode_scores(scores), len(scores)), scores, equal_nan=True)


def request(item, image='{"item": 0, "png": ""}') -> bytes:
    return f'{{"items": [{item}], "images": [{image}]}}'.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"x",
        b"[" * 100_000,
        b"[]",
        b"{}",
        request('{"item_id": 0, "prompt": 3}', ""),
        request('{"item_id": 0, "prompt": "", "metadata": 3}', ""),
        request('{"item_id": 0, "prompt": "", "image": 3}', ""),
        request('{"prompt": ""}', ""),
        request('{"item_id": 0, "prompt": ""}'),
        request('{"item_id": 0, "prompt": ""}', '{"item": 0, "png": "é"}'),
    ],
)
def test_other_requests_are_refused(body):
    with pytest.raises(WireError, match="'items' and 'images'"):
        decode_request(body)


def test_an_image_of_no_item_is_refused():
    body = json.loads(encode_request([picture(0)], [Item(0, "")]))
    body["images"][0]["item"] = 1
    with pytest.raises(WireError):
        decode_request(json.dumps(body).encode())


@pytest.mark.parametrize(
    "body", [b'{"scores": [1]}', b'{"scores": ["1", 2]}', b'{"scores": [true, 2]}', b'{"scores": 3}', b"{}", b"3", b"x"]
)
def test_other_answers_are_refused(body):
    with pytest.raises(WireError, match="scores"):
        decode_scores(body, 2)
