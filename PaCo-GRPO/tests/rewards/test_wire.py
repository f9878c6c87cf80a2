"""Messages to a reward service arrive unchanged; anything else is refused, in both directions."""

import base64
import io
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paco_grpo.rewards.remote import wire
from paco_grpo.rewards.remote.wire import WireError, decode_request, decode_scores, encode_request, encode_scores
from paco_grpo.types import Item

PICTURE = Image.new("RGB", (4, 4), "red")
GOOD = json.loads(encode_request([PICTURE] * 2, [Item(3, "edit", 4, 4, {"a": 1}, image=PICTURE), Item(5, "draw")]))


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8))


def test_images_and_items_arrive_and_an_item_is_sent_once():
    read = []
    grid = Item(4, 'say "é"', 64, 32, metadata={"criteria": {"Style": {"a": None}}, "idx": "x"})
    edit = Item(2, "edit", image=lambda: read.append(1) or picture(9), more_images=(picture(8), lambda: picture(7)))
    items = [grid, edit, grid, edit]
    body = encode_request([picture(i) for i in range(4)], items)
    assert len(json.loads(body)["items"]) == 2 and len(read) == 1
    images, arrived = decode_request(body)
    for i, (image, item, before) in enumerate(zip(images, arrived, items, strict=True)):
        assert np.array_equal(image, picture(i))
        for name in ("item_id", "prompt", "height", "width", "metadata"):
            assert getattr(item, name) == getattr(before, name)
        seeds = (9, 8, 7) if before is edit else ()
        assert len(item.images) == len(seeds)
        assert all(np.array_equal(image, picture(seed)) for image, seed in zip(item.images, seeds, strict=True))


@given(st.lists(st.one_of(st.just(math.nan), st.floats(allow_nan=False, allow_infinity=False)), max_size=5))
def test_scores_come_back_exactly_and_missing_as_missing(scores):
    assert np.array_equal(decode_scores(encode_scores(scores), len(scores)), scores, equal_nan=True)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"\xff", b"[" * 100_000, {"images": []}, {"images": [{"item": 9, "png": GOOD["images"][0]["png"]}], "items": []},
     GOOD | {"images": [{"item": 0, "png": ""}]}, GOOD | {"items": [{"more": 1, "images": []}]}, GOOD | {"items": 3}],
)  # fmt: skip
def test_a_body_of_another_form_is_refused(body):
    with pytest.raises(WireError, match="'items' and 'images'"):
        decode_request(body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 100_000, b'{"scores": [1]}', b'{"scores": [1, "a"]}', b'{"scores": 3}'])
def test_an_answer_of_another_form_is_refused(body):
    with pytest.raises(WireError, match="'scores'"):
        decode_scores(body, 2)


def test_pixels_are_counted_before_anything_is_decoded(monkeypatch):
    monkeypatch.setattr(wire, "MAX_PIXELS", 40)
    monkeypatch.setattr(wire, "to_rgb", lambda image: pytest.fail("decoded"))
    with pytest.raises(WireError, match="pixels"):
        decode_request(json.dumps(GOOD).encode())


@pytest.mark.parametrize("image_format", ["EPS", "TIFF"])
def test_a_service_opens_no_file_that_runs_programs(image_format):
    buffer = io.BytesIO()
    PICTURE.save(buffer, image_format)
    body = {"items": GOOD["items"][1:], "images": [{"item": 0, "png": base64.b64encode(buffer.getvalue()).decode()}]}
    with pytest.raises(WireError, match="PNG"):
        decode_request(json.dumps(body).encode())
