"""Whatever arrives, the reward wire is refused or read, in both directions, and so is a request to the service."""

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
from paco_grpo.rewards.remote.wire import WireError, decode_request, decode_scores, encode_request
from paco_grpo.types import Item

BOUNDED = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PICTURE = Image.new("RGB", (4, 4), "red")
GOOD = json.loads(encode_request([PICTURE] * 2, [Item(3, "edit", 4, 4, {"a": 1}, image=PICTURE), Item(5, "draw")]))


@BOUNDED
@given(body=bodies(GOOD, ("more",)))
def test_a_request_is_read_or_refused(body):
    try:
        images, items = decode_request(body)
    except WireError as error:
        assert len(str(error)) <= 500 and " at 0x" not in str(error)
        return
    assert len(images) == len(items)
    for item in items:
        assert type(item.item_id) is int and isinstance(item.prompt, str) and isinstance(item.metadata, dict)
        assert all(type(size) in (int, type(None)) for size in (item.height, item.width))


@BOUNDED
@given(body=st.one_of(bodies({"scores": [1.5, None, 2]}), st.sampled_from(RAW)))
def test_an_answer_is_read_or_refused(body):
    try:
        scores = decode_scores(body, 3)
    except WireError as error:
        assert len(str(error)) <= 500
        return
    assert len(scores) == 3 and not any(map(math.isinf, scores))


@pytest.fixture(scope="module")
def service():
    app = build_app(lambda images, items: np.zeros(len(images)), "zeros")
    with asyncio.Runner() as runner:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s", timeout=30)
        yield lambda body: runner.run(asyncio.wait_for(client.post("/score", content=body), 30))
        runner.run(client.aclose())


@BOUNDED
@given(body=bodies(GOOD, ("more",)))
def test_the_service_answers(service, body):
    answer = service(body)
    if answer.status_code != 200:
        check_refusal(answer.status_code, answer.content, (400,))


@pytest.mark.parametrize(
    "text", ["boom at /home/me/weights/a.bin", "http://10.0.0.7:8000/v1 is down", "<x object at 0x7f00aa11bb22>"]
)
def test_answers_name_no_place_of_the_server(text):
    def failing(images, items):
        raise ValueError(text)

    app = build_app(failing, "failing")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
            return await http.post("/score", json=GOOD)

    answer = asyncio.run(ask())
    check_refusal(answer.status_code, answer.content, (422,))
    assert "ValueError" in answer.text
    assert not any(private in answer.text for private in ("/home", "10.0.0.7", "0x7f"))


@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_a_score_that_is_no_number_is_an_error_and_no_json(score):
    app = build_app(lambda images, items: np.full(len(images), score), "infinite")

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
            return await http.post("/score", json=GOOD)

    answer = asyncio.run(ask())
    check_refusal(answer.status_code, answer.content, (422,))


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
