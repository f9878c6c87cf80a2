"""The transformers engine over HTTP: what callers see, from a real process and with real clients."""

import json
import math
import subprocess

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForImageTextToText

from paco_judge.client import JudgeClient, JudgeModelMissing, Pair
from paco_judge.images import png_data_url
from paco_judge.questions import build_messages, grid_layout_question, theme_question
from paco_judge.verdict import p_yes_from_logits
from vllm_server.transformers_engine.model import JudgeModel
from vllm_server.transformers_engine.protocol import RequestError, parse_request
from vllm_server.transformers_engine.server import build_app


def body(tiny, **more) -> dict:
    urls = [png_data_url(tiny.picture(seed)) for seed in (0, 1)]
    fields = {"model": "Tiny-Judge", "messages": build_messages(*urls, "same?"), "temperature": 0}
    return fields | more


@pytest.fixture
def post(engine_url, tiny):
    def send(**more) -> httpx.Response:
        return httpx.post(f"{engine_url}/v1/chat/completions", json=body(tiny, **more), timeout=120, trust_env=False)

    return send


def test_health_and_models(engine_url):
    with httpx.Client(base_url=engine_url, trust_env=False) as http:
        assert http.get("/health").json() == {"status": "ok"}
        (row,) = http.get("/v1/models").json()["data"]
    assert row["id"] == "Tiny-Judge" and row["max_model_len"] == 1024


def test_the_client_gets_the_models_own_scores(engine_url, judge_folder, tiny):
    judge = JudgeModel.load(str(judge_folder), 1024)  # its processor; the forward is transformers' own
    plain = AutoModelForImageTextToText.from_pretrained(judge_folder, dtype=torch.float32).eval()
    yes, no = (judge.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    pairs = [Pair(tiny.picture(i), tiny.picture(i + 1 + i % 3), theme_question(f"fox {i % 5}")) for i in range(18)]
    pairs += [Pair(tiny.picture(i), None, grid_layout_question(1 + i % 3, 2 + i)) for i in range(6)]  # one image alone
    verdicts = JudgeClient(engine_url, model="tiny-judge", deadline_s=300).score_blocking(pairs)
    scored = {1: 0, 2: 0}
    for pair, verdict in zip(pairs, verdicts, strict=True):
        content = [{"type": "image"}] * len(pair.images) + [{"type": "text", "text": pair.question}]
        text = judge.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = judge.processor(images=list(pair.images), text=[text], return_tensors="pt")
        expected = p_yes_from_logits(plain(**inputs).logits[0, -1].detach().numpy(), yes, no, top=20)
        if verdict.ok:
            scored[len(pair.images)] += 1
            assert verdict.p_yes == pytest.approx(float(expected), abs=1e-3)
        else:
            assert "neither Yes nor No" in verdict.error and math.isnan(expected)
    assert min(scored.values()) > 0


def test_a_model_that_is_not_served_lists_those_that_are(engine_url):
    with pytest.raises(JudgeModelMissing, match="serves 'Tiny-Judge'"):
        JudgeClient(engine_url, model="PaCo-Reward-7B").check()


def test_openai_client_with_logprobs_and_streaming(engine_url, tiny):
    client = openai.OpenAI(base_url=f"{engine_url}/v1", api_key="any", max_retries=0)
    request = body(tiny, logprobs=True, top_logprobs=5, max_tokens=7)
    whole = client.chat.completions.create(**request)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens <= 7
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 5
        assert entry.logprob == entry.top_logprobs[0].logprob and entry.token == entry.top_logprobs[0].token
        assert bytes(entry.bytes).decode() == entry.token
        assert sorted((each.logprob for each in entry.top_logprobs), reverse=True) == [
            each.logprob for each in entry.top_logprobs
        ]
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.finish_reason for part in parts][-1] == whole.choices[0].finish_reason
    streamed = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
    assert streamed == [entry.token for entry in entries]


def test_curl(engine_url, tiny, tmp_path):
    (tmp_path / "body.json").write_text(json.dumps(body(tiny, max_tokens=1)))
    command = ["curl", "-sS", "--noproxy", "*", f"{engine_url}/v1/chat/completions"]
    answer = subprocess.run(
        [*command, "-H", "content-type: application/json", "-d", f"@{tmp_path / 'body.json'}"],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(answer.stdout)["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_body_that_is_too_large_is_refused(engine_url, post):
    answer = post(user="x" * (5 << 20))
    assert answer.status_code == 413 and "larger than" in answer.json()["error"]["message"]
    assert httpx.get(f"{engine_url}/health", trust_env=False).status_code == 200


def test_an_unreadable_image_is_refused(post, tiny):
    url = png_data_url(tiny.picture(2))
    answer = post(messages=build_messages(url, "data:image/png;base64,AAAA", "same?"))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_image"
    streamed = post(messages=build_messages(url, "data:image/png;base64,AAAA", "same?"), stream=True)
    assert streamed.status_code == 400, "refused before the stream starts"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "model 'other' is not served here; served: a, b"),
        ({"temperature": 0.7}, 400, "temperature=0.7"),
        ({"n": 2}, 400, "n=2"),
        ({"tools": [{}]}, 400, "tools="),
        ({"response_format": {"type": "json"}}, 400, "'response_format' is not supported"),
        ({"max_tokens": 0}, 400, "max_tokens must be a whole number from 1"),
        ({"max_tokens": True}, 400, "max_tokens must be"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must be a whole number from 0 to 20"),
        ({"top_logprobs": 5}, 400, "needs logprobs"),
        ({"stream": "yes"}, 400, "stream must be true or false"),
        ({"stream_options": 1}, 400, "stream_options"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "needs a role"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "must be a text or a list"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "neither text nor image_url"),
        ({"messages": build_messages("http://example.test/a.png", "data:", "q")}, 400, "fetches nothing"),
        ({"messages": build_messages("file:///etc/passwd", "data:", "q")}, 400, "fetches nothing"),
        ({"messages": build_messages(*["data:image/png;base64,AA"] * 2, "q") * 9}, 400, "18 images"),
    ],
)
def test_what_is_not_understood_is_refused(fields, status, message):
    request = {"model": "a", "messages": [{"role": "user", "content": "hello"}]} | fields
    with pytest.raises(RequestError) as refused:
        parse_request(request, ("a", "b"))
    assert refused.value.status == status and message in str(refused.value)


def test_neutral_fields_are_accepted():
    neutral = {"n": 1, "top_p": 1, "temperature": 0, "stop": None, "seed": 3, "user": "me", "tools": None}
    request = parse_request({"model": "a", "messages": [{"role": "user", "content": "hi"}], **neutral}, ("a",))
    assert request.max_tokens is None and request.top_logprobs is None and not request.stream


class NoModel:
    """Enough of a model for what is refused before it is asked."""

    max_model_len = 10
    device = torch.device("cpu")


@pytest.fixture
async def guarded():
    app = build_app(NoModel(), ("a",), api_key="secret", max_body_bytes=100)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://e") as http:
        yield http


async def test_a_key_guards_everything_but_health(guarded):
    assert (await guarded.get("/health")).status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer sécret".encode()}):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            answer = await guarded.request(method, path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert (await guarded.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200


async def test_errors_have_openais_format(guarded):
    key = {"authorization": "Bearer secret"}
    for answer, status in [
        (await guarded.get("/v1/embeddings", headers=key), 404),
        (await guarded.get("/v1/chat/completions", headers=key), 405),
        (await guarded.post("/v1/chat/completions", headers=key, content=b"{"), 400),
        (await guarded.post("/v1/chat/completions", headers=key, content=b"[1]"), 400),
        (await guarded.post("/v1/chat/completions", headers=key, content=b"x" * 101), 413),
    ]:
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_without_a_length_is_bounded_too(guarded):
    async def drip():
        for _ in range(30):
            yield b"x" * 10

    answer = await guarded.post("/v1/chat/completions", headers={"authorization": "Bearer secret"}, content=drip())
    assert answer.status_code == 413
