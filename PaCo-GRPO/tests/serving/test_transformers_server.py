"""The server on transformers: its scores, and one request's faults that cost no other anything."""

import asyncio
import base64

import httpx
import numpy as np
import pytest
from PIL import Image
from serving_tools import body, top_logprobs

from paco_judge.client import Pair
from paco_judge.identity import identity
from paco_judge.images import data_url, encode
from paco_judge.questions import build_messages
from paco_judge.verdict import p_yes_from_top_logprobs
from vllm_server import transformers_server as server
from vllm_server.transformers_server import BatchWorker, build_app


@pytest.fixture
def worker(scorer):
    return BatchWorker(scorer)


@pytest.fixture
async def http(worker):
    app = build_app(worker, "Judge", weights="org/judge@7")
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


async def test_answers_of_mixed_batches_are_the_scorers(http, scorer, pairs, scores):
    """Of one token and of several, asked at once, each caller gets its own."""
    limits = [(3 + index % 4) ** (index % 2) for index in range(len(pairs))]
    bodies = [body(pair, max_tokens=limit) for pair, limit in zip(pairs, limits, strict=True)]
    answers = await ask(http, *bodies)
    texts = set()
    for pair, limit, score, answer in zip(pairs, limits, scores, answers, strict=True):
        top = top_logprobs(answer)
        assert p_yes_from_top_logprobs(top) == pytest.approx(score, abs=1e-5)
        (logits,) = scorer.first_token_logits([scorer.chat(pair)])
        logprobs = np.sort(logits - np.logaddexp.reduce(logits.astype(float)))[::-1]
        assert [entry["logprob"] for entry in top] == pytest.approx(logprobs[:20], abs=1e-4)
        choice = answer.json()["choices"][0]
        assert choice["logprobs"]["content"][0]["logprob"] == top[0]["logprob"]
        text = choice["message"]["content"]
        assert text.strip() == scorer.reasons([pair], limit)[0].text
        texts.add(text)
    assert len(texts) > 5


def test_an_answer_ends_with_any_token_that_ends_answers(scorer, monkeypatch):
    """The model's settings may name others than the tokenizer's."""
    monkeypatch.setattr(scorer.model.generation_config, "eos_token_id", [1, 7])
    worker = BatchWorker(scorer)
    for ids, answer in (([5, 7, 7], [5, 7]), ([5, 1, 3], [5, 1]), ([5, 6], [5, 6])):
        assert worker.until_end(ids) == answer


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
HALF = "data:image/png;base64," + base64.b64encode(encode(NOISE)[:-3000]).decode()


def shows(url: str) -> dict:
    return {"messages": build_messages([url], "same?")}


REFUSED = [
    ({"model": "other"}, 404),
    ({"temperature": 0.7}, 422),
    (shows("http://example.test/a.png"), 400),
    (shows(data_url(Image.new("RGB", (1, 300)))), 400),
    (shows(HALF), 400),
    (shows(5), 400),
    ({"messages": build_messages([], "<|image_pad|>")}, 400),
]


async def test_what_is_refused_costs_the_others_nothing(http, pairs, scores):
    refused = [body(pairs[0], **fields) for fields, _ in REFUSED]
    answers = await ask(http, *refused, *map(body, pairs))
    statuses = [answer.status_code for answer in answers[: len(REFUSED)]]
    assert statuses == [status for _, status in REFUSED]
    for answer, score in zip(answers[len(REFUSED) :], scores, strict=True):
        assert p_yes_from_top_logprobs(top_logprobs(answer)) == pytest.approx(score, abs=1e-5)


async def test_a_string_is_one_text(http, pairs):
    """In any role, as OpenAI's clients write it."""
    answers = []
    for system in ("Be strict.", [{"type": "text", "text": "Be strict."}]):
        request = body(pairs[0])
        request["messages"].insert(0, {"role": "system", "content": system})
        (answer,) = await ask(http, request)
        answers.append(top_logprobs(answer))
    assert answers[0] == answers[1]


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


async def test_routes(http):
    assert (await http.get("/health")).status_code == 200
    (row,) = (await http.get("/v1/models")).json()["data"]
    assert (row["id"], row["identity"]) == ("Judge", "org/judge@7")


def test_the_command_obeys_its_limit_of_pixels(judge_folder, monkeypatch):
    """Which limits are obeyed: test_weights.py in PaCo-Reward."""
    workers = []
    told = []

    def build_app(worker, name, key, weights):
        workers.append(worker)
        told.append(weights)

    monkeypatch.setattr(server, "build_app", build_app)
    monkeypatch.setattr(server.uvicorn, "run", lambda app, **_: None)
    words = ["--model", str(judge_folder), "--served-model-name", "Judge", "--max-pixels", "1568"]
    monkeypatch.setattr("sys.argv", ["server", *words])
    server.serve()
    assert workers[0].scorer.processor.image_processor.size["longest_edge"] == 1568
    assert told == [identity(judge_folder)]
