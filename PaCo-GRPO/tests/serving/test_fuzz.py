"""Whatever a caller sends, engine and gateway answer: with an error in OpenAI's format, never with a traceback."""

import asyncio

import httpx
import pytest
from engine_tools import chat_body
from fuzz import bodies, check_refusal
from gateway_tools import GatewayProcess, Upstream, health
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_server.transformers_engine.server import build_app

BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
GOOD = {
    "model": "Tiny-Judge", "messages": [{"role": "user", "content": [
        {"type": "text", "text": "same?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]}], "max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 3, "stream": False,
}  # fmt: skip
FIELDS = ("n", "stop", "tools", "seed", "user", "top_p", "stream_options", "logit_bias", "max_completion_tokens", "extra")


@pytest.fixture(scope="module")
def engine(judge):
    """Sends a body to the engine in this process; what it raises is raised here."""
    app = build_app(judge, ("Tiny-Judge",))
    with asyncio.Runner() as runner:
        context = app.router.lifespan_context(app)
        runner.run(context.__aenter__())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://e", timeout=30)
        yield lambda body: runner.run(asyncio.wait_for(client.post("/v1/chat/completions", content=body), 30))
        runner.run(client.aclose())
        runner.run(context.__aexit__(None, None, None))


@BOUNDED
@given(body=bodies(GOOD, FIELDS))
def test_the_engine_refuses_everything_else(engine, body):
    answer = engine(body)
    if answer.status_code != 200:  # some bodies are good ones
        check_refusal(answer.status_code, answer.content, (400, 404))


@pytest.fixture(scope="module")
def gateway():
    server = Upstream().start()
    gateway = GatewayProcess({"Tiny-Judge": [server]})
    yield gateway
    gateway.stop()
    server.kill()


@BOUNDED
@given(body=bodies(GOOD, FIELDS))
def test_the_gateway_refuses_what_it_cannot_route(gateway, body):
    answer = post(gateway, body)
    if answer.status_code != 200:
        check_refusal(answer.status_code, answer.content, (400, 404))


@BOUNDED
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]),
    path=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=30),
    host=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=10).map(str.strip),
    key=st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=10).map(str.strip),
)
def test_paths_and_headers_are_answered(gateway, method, path, host, key):
    headers = {b"host": host.encode("latin-1"), b"authorization": key.encode("latin-1")}
    request = httpx.Request(method, httpx.URL(gateway.url, path="/" + path), headers=headers)
    answer = CLIENT.send(request)
    if answer.status_code != 200 and method != "HEAD":
        check_refusal(answer.status_code, answer.content, (400, 404, 405))


def test_the_gateway_still_serves(gateway):
    with gateway.client() as client:
        assert gateway.ask(client, "Tiny-Judge").status_code == 200
    assert health(gateway.url) == 200


CLIENT = httpx.Client(trust_env=False, verify=False, timeout=30)


def post(gateway: GatewayProcess, body: bytes) -> httpx.Response:
    return CLIENT.post(gateway.chat_url, content=body)


def test_bodies_of_the_engine_are_sometimes_good(engine, tiny):
    """The fuzz tests reach the model, not only the parser."""
    import orjson

    assert engine(orjson.dumps(chat_body(tiny, max_tokens=1))).status_code == 200
