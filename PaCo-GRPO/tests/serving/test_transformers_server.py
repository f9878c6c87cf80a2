"""The server on transformers: its scores, and one request's faults that cost no other anything."""

import asyncio
import base64
import json
import math
import shutil

import httpx
import numpy as np
import pytest
import tiny_judge
import torch
from bitsandbytes import functional as bitsandbytes
from fastapi import FastAPI
from PIL import Image
from serving_tools import body, top_logprobs

from paco_judge import Judge
from paco_judge.client import Pair
from paco_judge.identity import Match, identity, match
from paco_judge.images import data_url, encode
from paco_judge.questions import build_messages
from paco_judge.scorer import JudgeScorer
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
    url, headers = "/v1/chat/completions", {"content-type": "application/json"}
    # Also what is no JSON, such as NaN.
    posts = [http.post(url, content=json.dumps(body), headers=headers) for body in bodies]
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
    ({"messages": build_messages([], "\ud800")}, 400),
    ({"temperature": math.nan}, 422),
    ({"\udfff": "\ud800"}, 422),
    # The model has 2,048 places, and would work for minutes.
    ({"messages": build_messages([], "a fox " * 100_000)}, 400),
    ({"max_tokens": 2040}, 400),
]


async def test_what_is_refused_costs_the_others_nothing(http, worker, pairs, scores, monkeypatch):
    generate = worker.scorer.generate
    asked = []

    def generate_and_count(chats, max_new_tokens):
        asked.extend(chats)
        return generate(chats, max_new_tokens)

    monkeypatch.setattr(worker.scorer, "generate", generate_and_count)
    refused = [body(pairs[0], **fields) for fields, _ in REFUSED]
    answers = await ask(http, *refused, *map(body, pairs))
    assert len(asked) == len(pairs)
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
        for index, text in enumerate(texts):
            if text in ("nan", "inf"):
                logits[index, 3] = float(text)
        return ids, logits

    monkeypatch.setattr(worker.scorer, "generate", generate_or_fail)
    bad = [Pair(*pairs[0].images, text) for text in ("memory", "nan", "inf")]
    answers = await ask(http, *map(body, (*pairs[:3], *bad)))
    # Damaged weights are not worth a repetition, which a 5xx would ask for.
    assert [answer.status_code for answer in answers] == [200, 200, 200, 500, 422, 422]


async def test_routes(http):
    assert (await http.get("/health")).status_code == 200
    (row,) = (await http.get("/v1/models")).json()["data"]
    assert (row["id"], row["identity"]) == ("Judge", "org/judge@7")


@pytest.fixture
def serve(monkeypatch):
    """``serve(option, …)``: the application of the command with these options."""
    apps = []
    monkeypatch.setattr(server.uvicorn, "run", lambda app, **_: apps.append(app))

    def serve(*words) -> FastAPI:
        monkeypatch.setattr("sys.argv", ["server", *map(str, words)])
        server.serve()
        return apps.pop()

    return serve


async def test_a_judge_shrinks_an_image_alike_in_this_process_and_at_its_server(
    serve, judge_folder, tmp_path, monkeypatch
):
    """Its processor allows more, as that of Qwen2.5-VL does."""
    folder = shutil.copytree(judge_folder, tmp_path / "judge")
    file = folder / "processor_config.json"
    settings = json.loads(file.read_bytes())
    settings["image_processor"]["size"] |= {"longest_edge": 12_845_056}
    file.write_text(json.dumps(settings))
    pair = Pair(tiny_judge.picture(1, 150), tiny_judge.picture(2, 130), "same?")
    scores = {}
    for limit in ("3136", "6272", "0"):
        monkeypatch.setenv("VLLM_MAX_PIXELS", limit)
        judge = Judge.from_pretrained(folder)
        (verdict,) = judge.verdicts([pair])
        app = serve("--model", folder, "--served-model-name", "Judge", "--max-pixels", limit)
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://e", timeout=120) as http,
        ):
            (answer,) = await ask(http, body(pair))
            (row,) = (await http.get("/v1/models")).json()["data"]
        assert row["identity"] == identity(folder)
        assert p_yes_from_top_logprobs(top_logprobs(answer)) == pytest.approx(verdict.p_yes, 1e-6)
        scores[limit] = verdict.p_yes
    assert np.diff(sorted(scores.values())).min() > 1e-4
    monkeypatch.delenv("VLLM_MAX_PIXELS")
    processor = JudgeScorer.from_pretrained(folder).processor
    assert processor.image_processor.size["longest_edge"] == 2_097_152


async def test_a_judge_in_4_bits_is_one_with_rounded_weights_and_says_so(
    judge_folder, pairs, serve
):
    rounded = JudgeScorer.from_pretrained(judge_folder)
    before = [verdict.p_yes for verdict in rounded.score(pairs)]
    for name, layer in rounded.model.named_modules():
        if type(layer) is torch.nn.Linear and name != "lm_head":
            weight = layer.weight.data
            codes = bitsandbytes.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
            weight.copy_(bitsandbytes.dequantize_4bit(*codes))
    expected = [verdict.p_yes for verdict in rounded.score(pairs)]
    assert np.abs(np.subtract(expected, before)).max() > 1e-3
    app = serve("--model", judge_folder, "--served-model-name", "Judge", "--quantize", "nf4")
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://e", timeout=120) as http,
    ):
        answers = await ask(http, *map(body, pairs))
        (row,) = (await http.get("/v1/models")).json()["data"]
    scores = [p_yes_from_top_logprobs(top_logprobs(answer)) for answer in answers]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    whole = identity(judge_folder)
    assert match(whole, row["identity"]) is Match.DIFFERENT
    assert match(row["identity"], f"{whole} + nf4") is Match.SAME
