"""The transformers engine over HTTP: what callers see, from a real process and with real clients."""

import math

import httpx
import openai
import orjson
import pytest
import torch
from engine_tools import chat_body, parse, plain_logprobs, plain_model

from paco_grpo.asgi import ApiError
from paco_judge.client import JudgeClient, Pair
from paco_judge.images import data_url
from paco_judge.questions import build_messages, load_question, theme_question
from paco_judge.verdict import p_yes_from_logits
from vllm_server.transformers_engine.protocol import parse_request
from vllm_server.transformers_engine.server import build_app


@pytest.fixture(scope="module")
def http(engine_url):
    with httpx.Client(base_url=engine_url, trust_env=False, timeout=120) as http:
        yield http


def test_health_and_models(http):
    assert http.get("/health").json() == {"status": "ok"}
    (row,) = http.get("/v1/models").json()["data"]
    assert row["id"] == "Tiny-Judge" and row["max_model_len"] == 1024


def test_the_judges_client_gets_the_models_own_scores(engine_url, judge, judge_folder, tiny):
    plain = plain_model(judge_folder)
    yes, no = (judge.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    pairs = [Pair(tiny.picture(i), tiny.picture(i + 1 + i % 3), theme_question(f"fox {i % 5}")) for i in range(18)]
    layout = load_question("grid_layout")
    pairs += [Pair(tiny.picture(i), None, layout.text(rows=1 + i % 3, cols=2 + i)) for i in range(6)]  # one image alone
    verdicts = JudgeClient(engine_url, model="tiny-judge", deadline_s=300).score_blocking(pairs)
    scored = {1: 0, 2: 0}
    for pair, verdict in zip(pairs, verdicts, strict=True):
        logprobs = plain_logprobs(plain, judge.processor, pair.images, pair.question)
        expected = p_yes_from_logits(logprobs.numpy(), yes, no, top=20)
        if verdict.ok:
            scored[len(pair.images)] += 1
            assert verdict.p_yes == pytest.approx(float(expected), abs=1e-3)
        else:
            assert "neither Yes nor No" in verdict.error and math.isnan(expected)
    assert min(scored.values()) > 0


def test_openai_client_with_logprobs_and_streaming(engine_url, tiny):
    client = openai.OpenAI(base_url=f"{engine_url}/v1", api_key="any", max_retries=0)
    body = chat_body(tiny, logprobs=True, top_logprobs=5, max_tokens=7)
    whole = client.chat.completions.create(**body)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens <= 7
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for entry in entries:
        top = [each.logprob for each in entry.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True)
        assert entry.logprob == top[0] and entry.token == entry.top_logprobs[0].token
        assert bytes(entry.bytes).decode() == entry.token
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    streamed = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
    assert streamed == [entry.token for entry in entries]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unreadable_image_is_refused(http, tiny, stream):
    messages = build_messages(data_url(tiny.picture(2)), "data:image/png;base64,AAAA", "same?")
    answer = http.post("/v1/chat/completions", json=chat_body(tiny, messages=messages, stream=stream))
    assert answer.status_code == 400, "before a stream starts"
    assert answer.json()["error"]["code"] == "invalid_image"


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"temperature": 0.7}, 400, "temperature"),
        ({"n": 2}, 400, "n"),
        ({"stop": ["."]}, 400, "stop"),
        ({"tools": [{}]}, 400, "tools"),
        ({"response_format": {"type": "json"}}, 400, "response_format"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"top_logprobs": 5}, 400, "top_logprobs"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": 1}, 400, "stream_options"),
        ({"messages": None}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": ["hello"]}]}, 400, "messages"),
        ({"messages": build_messages("http://example.test/a.png", "data:", "q")}, 400, "messages"),
        ({"messages": build_messages("file:///etc/passwd", "data:", "q")}, 400, "messages"),
        ({"messages": build_messages(*["data:image/png;base64,AA"] * 2, "q") * 9}, 400, "messages"),
    ],
)
def test_unsupported_requests_are_refused(fields, status, param):
    with pytest.raises(ApiError) as refused:
        parse(("a", "b"), **{"model": "a", "messages": HELLO} | fields)
    assert (refused.value.status, refused.value.param) == (status, param)
    assert len(str(refused.value)) < 400, "an image is not repeated in the message"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(content):
    with pytest.raises(ApiError, match="JSON"):
        parse_request(content, ("a",))


def test_neutral_fields_are_accepted():
    neutral = {"n": 1, "top_p": 1, "temperature": 0, "presence_penalty": 0.0, "stop": None, "seed": 3, "user": "me"}
    parsed = parse(messages=HELLO, tools=[], response_format=None, **neutral)
    assert parsed.max_tokens is None and parsed.top_logprobs is None and not parsed.stream
    assert parsed.turns == (("user", ("hello",)),)
    parsed = parse(messages=HELLO, max_tokens=3, max_completion_tokens=2, logprobs=True)
    assert parsed.max_tokens == 2 and parsed.top_logprobs == 0


class NoModel:
    """Enough of a model for requests that are refused before it is used."""

    max_model_len = 10
    device = torch.device("cpu")


KEY = {"authorization": "Bearer secret"}


@pytest.fixture
async def guarded():
    app = build_app(NoModel(), ("a",), api_key="secret", max_body_bytes=100)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://e") as http:
        yield http


async def test_a_key_guards_everything_except_health(guarded):
    assert (await guarded.get("/health")).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer sécret".encode()}):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            answer = await guarded.request(method, path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert (await guarded.get("/v1/models", headers=KEY)).status_code == 200


async def drip():
    for _ in range(30):
        yield b"x" * 10


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/v1/embeddings", None, 404),
        ("GET", "/v1/chat/completions", None, 405),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", orjson.dumps({"model": "b"}), 404),
        ("POST", "/v1/chat/completions", b"x" * 101, 413),
        ("POST", "/v1/chat/completions", drip(), 413),  # of no declared length
    ],
)
async def test_errors_have_openais_format(guarded, method, path, content, status):
    answer = await guarded.request(method, path, headers=KEY, content=content)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
