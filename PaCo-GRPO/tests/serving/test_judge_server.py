"""The engine on transformers: its scores and its limits.

What is wrong with one request costs no other request anything.
"""

import asyncio
import base64
import json

import httpx
import numpy as np
import pytest
from PIL import Image

from paco_grpo.asgi import ApiError
from paco_judge.client import Pair
from paco_judge.images import data_url, encode
from paco_judge.questions import build_messages, theme_question
from paco_judge.verdict import p_yes_from_top_logprobs
from vllm_server import judge_server
from vllm_server.judge_server import BatchWorker, build_app

SCORE = {"model": "Judge", "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}


@pytest.fixture
def engine(scorer):
    return BatchWorker(scorer, max_model_len=1024)


@pytest.fixture
async def http(engine):
    app = build_app(engine, "Judge", max_body_bytes=1 << 20)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://e", timeout=120
        ) as http,
    ):
        yield http


def pairs_of(tiny, count: int) -> list[Pair]:
    """Of different lengths; some share images."""
    pictures = [tiny.picture(seed, 28 + 9 * seed) for seed in range(4)]
    return [
        Pair(
            pictures[i % 4],
            pictures[(i + 1 + i // 4) % 4],
            theme_question("a fox" + " and a boat" * (i % 3)),
        )
        for i in range(count)
    ]


def body(pair: Pair, **fields) -> dict:
    return (
        SCORE | {"messages": build_messages([*map(data_url, pair.images)], pair.question)} | fields
    )


async def test_scores_are_the_scorers_whatever_the_batch(http, scorer, tiny):
    pairs = pairs_of(tiny, 24)
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=body(pair)) for pair in pairs)
    )
    expected = scorer.score(pairs, top=20)
    for answer, verdict in zip(answers, expected, strict=True):
        (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
        top = [each["logprob"] for each in entry["top_logprobs"]]
        assert len(top) == 20 and top == sorted(top, reverse=True) and entry["logprob"] == top[0]
        found = p_yes_from_top_logprobs(entry["top_logprobs"])
        assert found == (None if verdict.p_yes is None else pytest.approx(verdict.p_yes, abs=1e-5))
    assert sum(verdict.ok for verdict in expected) > 10


async def test_longer_answers_are_the_scorers_too(http, scorer, tiny):
    pairs = pairs_of(tiny, 4)
    limits = [3, 7, 5, 1]
    asked = [
        body(pair, max_tokens=limit, logprobs=False, top_logprobs=0)
        for pair, limit in zip(pairs, limits)
    ]
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=each) for each in asked)
    )
    for pair, limit, answer in zip(pairs, limits, answers, strict=True):
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        assert choice["message"]["content"].strip() == scorer.reasons([pair], limit)[0].text
        assert usage["completion_tokens"] <= limit and choice["logprobs"] is None
        assert choice["finish_reason"] == "length" or usage["completion_tokens"] < limit


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
BAD_IMAGES = {
    "1x300": data_url(Image.new("RGB", (1, 300))),
    "cut off": "data:image/png;base64," + base64.b64encode(encode(NOISE)[:-3000]).decode(),
    "more pixels than a request may have": data_url(Image.new("RGB", (80, 80))),
    "no base64": "data:image/png;base64,A",
}


async def test_a_bad_image_is_an_error_of_its_own_request(http, tiny, monkeypatch):
    monkeypatch.setattr(judge_server, "MAX_REQUEST_PIXELS", 80 * 80)
    (good,) = pairs_of(tiny, 1)
    asked = [body(good)]
    for bad, limit in zip(BAD_IMAGES.values(), (2000, 1, 1, 1), strict=True):
        messages = build_messages([bad, data_url(good.image_a)], "same?")
        asked += [body(good, messages=messages, max_tokens=limit), body(good)]
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=each) for each in asked)
    )
    assert [answer.status_code for answer in answers] == [200] + [400, 200] * len(BAD_IMAGES)
    for answer in answers[1::2]:
        assert answer.json()["error"]["code"] == "invalid_image" and "0x" not in answer.text


TEXT = [{"role": "user", "content": "hello"}]


async def test_unsupported_requests_are_refused(http):
    for fields, status, param in (
        ({"model": "other"}, 404, "model"),
        ({"temperature": 0.7}, 400, "temperature"),
        ({"stream": True}, 400, "stream"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        (
            {"messages": build_messages(["http://example.test/a.png", "data:"], "q")},
            400,
            "messages",
        ),
        ({"messages": build_messages(["file:///etc/passwd", "data:"], "q")}, 400, "messages"),
        ({"messages": build_messages(["data:image/png;base64,AA"] * 2, "q") * 9}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a" * 100_000}]}, 400, "messages"),
        (
            {"max_tokens": 1000, "messages": [{"role": "user", "content": "a b c " * 100}]},
            400,
            "messages",
        ),
    ):
        answer = await http.post("/v1/chat/completions", json=SCORE | {"messages": TEXT} | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), fields
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 600


async def test_routes_bodies_and_key(engine, http):
    assert (await http.get("/health")).json() == {"status": "ok"}
    (row,) = (await http.get("/v1/models")).json()["data"]
    assert row["id"] == "Judge" and row["max_model_len"] == 1024
    unknown = await http.get("/v1/embeddings")
    assert unknown.status_code == 404 and "/v1/embeddings" in unknown.json()["error"]["message"]
    neutral = {
        "messages": TEXT,
        "n": 1,
        "top_p": 1.0,
        "temperature": 0.0,
        "stop": None,
        "seed": 3,
        "user": "me",
    }
    answer = await http.post(
        "/v1/chat/completions",
        json=SCORE | neutral | {"max_tokens": None, "max_completion_tokens": 1},
    )
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1
    for content, status in ((b"x" * (1 << 20) + b"x", 413), (b"{", 400), (b"[" * 100_000, 400)):
        assert (await http.post("/v1/chat/completions", content=content)).status_code == status
    guarded = build_app(engine, "Judge", api_key="secret")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(guarded), base_url="http://e"
    ) as keyed:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer sécret".encode()},
        ):
            assert (await keyed.get("/v1/models", headers=headers)).status_code == 401
        assert (
            await keyed.get("/v1/models", headers={"authorization": "Bearer secret"})
        ).status_code == 200


async def test_a_request_that_fails_costs_the_others_nothing(engine, http, tiny, monkeypatch):
    """A batch that fails is tried twice, whole and one by one.

    Damaged weights are not worth a repetition.
    """
    plain, measure, calls = engine.scorer.first_token_logits, engine.scorer.length, []

    def text(chat):
        return chat.messages[-1]["content"][-1]["text"]

    def length(chat):
        if text(chat) == "template":
            raise RuntimeError("no user query found")
        return measure(chat)

    def forward(chats):
        texts = [*map(text, chats)]
        calls.append(texts)
        if "memory" in texts:
            raise RuntimeError("out of memory")
        logits = plain(chats)
        logits[[each == "nan" for each in texts]] = np.nan
        return logits

    monkeypatch.setattr(engine.scorer, "length", length)
    monkeypatch.setattr(engine.scorer, "first_token_logits", forward)
    good = pairs_of(tiny, 3)
    bad = [Pair(good[0].image_a, good[0].image_b, each) for each in ("template", "memory", "nan")]
    answers = await asyncio.gather(
        *(http.post("/v1/chat/completions", json=body(pair)) for pair in (*good, *bad))
    )
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 500, 422]
    assert sum("memory" in texts for texts in calls) <= 2


async def test_more_alternatives_than_there_are_tokens(engine, http, tiny):
    """Of a toy's vocabulary, all are listed."""
    plain = engine.scorer.first_token_logits
    engine.scorer.first_token_logits = lambda chats: plain(chats)[:, :7]
    try:
        answer = await http.post("/v1/chat/completions", json=body(pairs_of(tiny, 1)[0]))
    finally:
        del engine.scorer.first_token_logits
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert answer.status_code == 200 and len(entry["top_logprobs"]) == 7


async def test_nothing_is_computed_for_a_caller_who_left(engine, http, tiny, monkeypatch):
    opened = []
    plain = engine._open
    monkeypatch.setattr(engine, "_open", lambda job: opened.append(job) or plain(job))

    async def left() -> bool:
        return True

    request = judge_server.parse_request(json.dumps(body(pairs_of(tiny, 1)[0])).encode(), "Judge")
    with pytest.raises(ApiError, match="left"):
        await engine.ask(request, left)
    assert not opened
    answer = await http.post("/v1/chat/completions", json=body(pairs_of(tiny, 1)[0]))
    assert answer.status_code == 200 and len(opened) == 1


async def test_a_text_that_cannot_fit_is_not_tokenized(engine, http, tiny, monkeypatch):
    monkeypatch.setattr(engine.scorer, "length", None)
    text = [{"role": "user", "content": "a" * (engine._most_bytes + 1)}]
    answer = await http.post("/v1/chat/completions", json=SCORE | {"messages": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
