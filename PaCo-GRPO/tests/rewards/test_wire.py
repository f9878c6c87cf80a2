"""Messages to a reward service arrive unchanged; anything else is refused, in both directions."""

import asyncio
import base64
import io
import json
import math

import httpx
import numpy as np
import pytest
from fuzz import RAW, bodies, check_refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from paco_grpo import images as limits
from paco_grpo.rewards.remote.service import build_app
from paco_grpo.rewards.remote.wire import WireError, decode_request, decode_scores, encode_request, encode_scores
from paco_grpo.types import Item

BOUNDED = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
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


def post(reward, body: bytes) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(reward, "r"))
        async with httpx.AsyncClient(transport=transport, base_url="http://s", timeout=30) as http:
            return await asyncio.wait_for(http.post("/score", content=body), 30)

    return asyncio.run(ask())


@BOUNDED
@given(body=bodies(GOOD, ("more",)))
def test_a_request_is_read_or_refused(body):
    try:
        images, items = decode_request(body)
    except WireError as error:
        assert len(str(error)) <= 500 and " at 0x" not in str(error)
        answer = post(None, body)
        check_refusal(answer.status_code, answer.content, (400,))
        return
    assert len(images) == len(items)
    for item in items:
        assert type(item.item_id) is int and isinstance(item.prompt, str) and isinstance(item.metadata, dict)
        assert all(type(size) in (int, type(None)) for size in (item.height, item.width))


@pytest.mark.parametrize("change", [{"item": 2}, {"item": -1}, {"item": True}, {"item": "0"}, {"png": ""}, {"png": "é"}])
def test_an_image_needs_an_item_and_a_png(change):
    body = GOOD | {"images": [GOOD["images"][0] | change]}
    with pytest.raises(WireError, match="'items' and 'images'"):
        decode_request(json.dumps(body).encode())


@BOUNDED
@given(body=st.one_of(bodies({"scores": [1.5, None, 2]}), st.sampled_from(RAW)))
def test_an_answer_is_read_or_refused(body):
    try:
        scores = decode_scores(body, 3)
    except WireError as error:
        assert len(str(error)) <= 500
        return
    assert len(scores) == 3 and not any(map(math.isinf, scores))


@pytest.mark.parametrize("text", ["/home/me/weights/a.bin", "http://10.0.0.7:8000/v1", "<x object at 0x7f00aa11bb22>", None])
def test_a_failed_reward_is_an_error_that_names_no_place_of_the_server(text):
    def reward(images, items):
        if text is None:
            return np.full(len(images), math.inf)  # no JSON
        raise ValueError(text)

    answer = post(reward, json.dumps(GOOD).encode())
    check_refusal(answer.status_code, answer.content, (422,))
    assert "ValueError" in answer.text
    assert not any(private in answer.text for private in ("/home", "10.0.0.7", "0x7f"))


@pytest.mark.parametrize("limit", ["MAX_PIXELS", "MAX_REQUEST_PIXELS"])
def test_pixels_are_counted_before_anything_is_decoded(monkeypatch, limit):
    monkeypatch.setattr(limits, limit, 40 if limit == "MAX_REQUEST_PIXELS" else 15)
    monkeypatch.setattr(Image.Image, "convert", lambda *arguments: pytest.fail("decoded"))
    with pytest.raises(WireError, match="pixels"):
        decode_request(json.dumps(GOOD).encode())


@pytest.mark.parametrize("image_format", ["JPEG", "EPS", "TIFF"])
def test_a_service_opens_png_only(image_format):
    buffer = io.BytesIO()
    PICTURE.save(buffer, image_format)
    body = {"items": GOOD["items"][1:], "images": [{"item": 0, "png": base64.b64encode(buffer.getvalue()).decode()}]}
    with pytest.raises(WireError, match="PNG"):
        decode_request(json.dumps(body).encode())
