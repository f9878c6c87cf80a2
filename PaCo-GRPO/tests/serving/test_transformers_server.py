"""The server on transformers: its scores, and one request's faults that cost no other anything."""

import asyncio
import base64
import io

import httpx
import numpy as np
import pytest
from PIL import Image
from serving_tools import body, top_logprobs

from paco_judge.client import Pair
from paco_judge.images import data_url, encode
from paco_judge.questions import build_messages
from paco_judge.scorer import JudgeScorer
from paco_judge.verdict import p_yes_from_top_logprobs
from vllm_server.transformers_server import BatchWorker, build_app, limit_images


@pytest.fixture
def worker(scorer):
    return BatchWorker(scorer, max_model_len=1024)


@pytest.fixture
async def http(worker):
    app = build_app(worker, "Judge")
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://e", timeout=120
        ) as http,
    ):
        yield http


async def ask(http, *bodies: dict) -> list[httpx.Response]:
    """Answers to questions that are asked at once."""
    posts = [http.post("/v1/chat/completions", json=body) for body in bodies]
    return await asyncio.gather(*posts)


async def test_answers_of_mixed_batches_are_the_scorers(http, worker, pairs, scores, monkeypatch):
    """Of one token and of several, in one call, each caller gets its own."""
    sizes = []
    work = worker.work
    monkeypatch.setattr(worker, "work", lambda jobs: sizes.append(len(jobs)) or work(jobs))
    limits = {index: 3 + index % 4 for index in range(0, 16, 2)}
    answers = await ask(
        http, *(body(pair, max_tokens=limits.get(i, 1)) for i, pair in enumerate(pairs))
    )
    assert max(sizes) > 8
    texts = set()
    for index, answer in enumerate(answers):
        pair = pairs[index]
        limit = limits.get(index, 1)
        top = top_logprobs(answer)
        assert p_yes_from_top_logprobs(top) == pytest.approx(scores[index], abs=1e-5)
        (logits,) = worker.scorer.first_token_logits([worker.scorer.chat(pair)])
        logprobs = np.sort(logits - np.logaddexp.reduce(logits.astype(float)))[::-1]
        assert [entry["logprob"] for entry in top] == pytest.approx(logprobs[:20], abs=1e-4)
        choice = answer.json()["choices"][0]
        assert choice["logprobs"]["content"][0]["logprob"] == top[0]["logprob"]
        text = choice["message"]["content"]
        assert text.strip() == worker.scorer.reasons([pair], limit)[0].text
        texts.add(text)
    assert len(texts) > 5


async def test_an_answer_ends_with_any_token_that_ends_answers(scorer, pairs, monkeypatch):
    """The model's settings may name others than the tokenizer's."""
    chats = [scorer.chat(pair) for pair in pairs]
    ids, _ = scorer.generate(chats, 2)
    index = (ids[:, 0] != ids[:, 1]).int().argmax().item()
    first, end = ids[index].tolist()
    assert first != end
    monkeypatch.setattr(scorer.model.generation_config, "eos_token_id", [1, end])
    app = build_app(BatchWorker(scorer, 1024), "Judge")
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e")
    async with app.router.lifespan_context(app), client as http:
        long, short = await ask(
            http, body(pairs[index], max_tokens=6), body(pairs[index], max_tokens=1)
        )
    for answer, count, reason in ((long, 2, "stop"), (short, 1, "length")):
        assert answer.json()["usage"]["completion_tokens"] == count
        assert answer.json()["choices"][0]["finish_reason"] == reason


async def test_images_are_turned_as_their_exif_data_say(http, pairs, scores):
    first, second = pairs[0].images
    exif = Image.Exif()
    exif[274] = 6  # a viewer turns it to the right
    file = io.BytesIO()
    first.rotate(90, expand=True).save(file, "PNG", exif=exif)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    messages = build_messages([url, data_url(second)], pairs[0].question)
    (answer,) = await ask(http, body(pairs[0], messages=messages))
    assert p_yes_from_top_logprobs(top_logprobs(answer)) == pytest.approx(scores[0], abs=1e-5)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
HELLO = [{"role": "user", "content": "hello"}]


def shows(*urls: str) -> dict:
    return {"messages": build_messages(urls, "same?")}


REFUSED = {
    "another model": ({"model": "other"}, 404, "model"),
    "sampling": ({"temperature": 0.7}, 400, "temperature"),
    "a misspelt field": ({"max_token": 2}, 400, "max_token"),
    "an image elsewhere": (shows("http://example.test/a.png"), 400, "messages"),
    "a thin image": (shows(data_url(Image.new("RGB", (1, 300)))), 400, "messages"),
    "no base64": (shows("data:image/png;base64,A"), 400, "messages"),
    "half an image": (
        shows("data:image/png;base64," + base64.b64encode(encode(NOISE)[:-3000]).decode()),
        400,
        "messages",
    ),
    "a reserved token": (
        {"messages": [{"role": "user", "content": "<|image_pad|>"}]},
        400,
        "messages",
    ),
    "a long prompt": (
        {"messages": [{"role": "user", "content": "a b c " * 2000}]},
        400,
        "messages",
    ),
    "a long answer": ({"messages": HELLO, "max_tokens": 1023}, 400, "messages"),
}


async def test_what_is_refused_costs_the_others_nothing(http, pairs, scores):
    bodies = []
    for index, (fields, _, _) in enumerate(REFUSED.values()):
        bodies += [body(pairs[0], **fields), body(pairs[index])]
    answers = await ask(http, *bodies)
    codes = {}
    for name, answer in zip(REFUSED, answers[::2], strict=True):
        _, status, param = REFUSED[name]
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), name
        codes[name] = error["code"]
    images = [name for name, code in codes.items() if code == "invalid_image"]
    assert images == ["half an image"]
    assert codes["a long prompt"] == codes["a long answer"] == "context_length_exceeded"
    for answer, score in zip(answers[1::2], scores, strict=False):
        assert p_yes_from_top_logprobs(top_logprobs(answer)) == pytest.approx(score, abs=1e-5)


async def test_an_engine_that_fails_on_one_request_answers_the_others(
    http, worker, pairs, monkeypatch
):
    generate = worker.scorer.generate

    def generate_or_fail(chats, max_new_tokens):
        texts = [chat.messages[-1]["content"][-1]["text"] for chat in chats]
        if "memory" in texts:
            raise RuntimeError("out of memory")
        ids, logits = generate(chats, max_new_tokens)
        logits[[text == "nan" for text in texts]] = np.nan
        return ids, logits

    monkeypatch.setattr(worker.scorer, "generate", generate_or_fail)
    bad = [Pair(*pairs[0].images, text) for text in ("memory", "nan")]
    answers = await ask(http, *map(body, (*pairs[:3], *bad)))
    # Damaged weights are not worth a repetition, which a 5xx would ask for.
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 422]


async def test_routes_and_key(worker, http):
    assert (await http.get("/health")).status_code == 200
    (row,) = (await http.get("/v1/models")).json()["data"]
    assert (row["id"], row["max_model_len"]) == ("Judge", 1024)
    assert (await http.post("/v1/chat/completions", content=b"[" * 100_000)).status_code == 400
    guarded = httpx.ASGITransport(build_app(worker, "Judge", api_key="secret"))
    async with httpx.AsyncClient(transport=guarded, base_url="http://e") as keyed:
        for key, status in (("", 401), ("secre", 401), ("secret1", 401), ("secret", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await keyed.get("/v1/models", headers=headers)).status_code == status
            assert (await keyed.get("/health", headers=headers)).status_code == 200


def test_a_limit_shrinks_large_images_and_raises_no_limit(judge_folder):
    """An exported judge has the limit of its own training."""
    numbers = []
    large = Image.new("RGB", (300, 200))
    for limit in (None, 28 * 28 * 2, 10**9):
        scorer = JudgeScorer.from_pretrained(judge_folder)
        if limit:
            limit_images(scorer, limit)
        numbers.append(scorer.length(scorer.chat(Pair(large, large, "same?"))))
    whole, small, unchanged = numbers
    assert small < whole == unchanged
