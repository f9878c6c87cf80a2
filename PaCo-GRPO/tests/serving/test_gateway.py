"""The gateway: one port, each request once to the server of its model."""

import asyncio
import json

import httpx
import pytest

from paco_grpo.asgi import SERVER_SETTINGS
from vllm_server.gateway import LIMITS, build_app

PORTS = {"A": 1, "A=2": 1, "B": 2, "down": 3, "hangs": 4}
ERRORS = {3: httpx.ConnectError, 4: httpx.ReadTimeout}
LISTED = {1: ["A", "A=2"], 2: ["private", "B"]}


def answered(content: dict, status: int = 200) -> httpx.Response:
    """An answer in two parts."""

    async def parts():
        text = json.dumps(content).encode()
        yield text[:5]
        yield text[5:]

    return httpx.Response(status, content=parts())


def gateway(names=("A", "A=2", "B"), api_key=None) -> tuple:
    """Its life, a client that asks it, and the questions that reach the servers."""
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        port = request.url.port
        if request.method == "POST":
            sent.append(request)
        if port in ERRORS:
            raise ERRORS[port]("no")
        if request.method == "GET":
            rows = [{"id": name, "identity": f"o/{name}@{port}"} for name in LISTED[port]]
            return httpx.Response(200, json={"data": rows})
        asked = json.loads(request.content)
        if asked.get("bad"):
            return answered({}, 400)
        return answered({"port": port, "path": request.url.path, "asked": asked})

    urls = {name: f"http://u:{PORTS[name]}" for name in names}
    app = build_app(urls, api_key, httpx.MockTransport(answer))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g")
    return app.router.lifespan_context(app), client, sent


async def test_each_request_goes_once_to_the_server_of_its_model():
    life, http, sent = gateway()
    async with life, http:
        questions = []
        for index in range(12):
            path = ("chat/completions", "embeddings", "completions", "rerank")[index % 4]
            model = ("A", "B", "A=2")[index % 3]
            questions.append((f"/v1/{path}", {"model": model, "max_tokens": index + 1}))
        headers = {"x-request-id": "7", "cookie": "c"}
        posts = [http.post(path, json=asked, headers=headers) for path, asked in questions]
        answers = await asyncio.gather(*posts)
        for (path, asked), answer in zip(questions, answers, strict=True):
            assert answer.json() == {"port": PORTS[asked["model"]], "path": path, "asked": asked}
        assert len(sent) == len(questions)
        for request in sent:
            assert request.headers["x-request-id"] == "7"
            assert "cookie" not in request.headers
            # Answers wait for all earlier questions; callers have deadlines of their own.
            assert request.extensions["timeout"]["read"] >= 600
            assert request.extensions["timeout"]["pool"] is None
        bad = await http.post("/v1/chat/completions", json={"model": "A", "bad": 1})
        assert (bad.status_code, bad.json()) == (400, {})
        assert (await http.get("/health")).json() == {"models": {"A": True, "A=2": True, "B": True}}


@pytest.mark.parametrize(
    ("content", "status", "num_sent"),
    [
        (b"[1]", 400, 0),
        (b"[" * 200_000, 400, 0),
        (b'{"model": "C"}', 404, 0),
        (b'{"model": "down"}', 502, 1),
        (b'{"model": "hangs"}', 502, 1),
    ],
)
async def test_what_cannot_be_answered_is_an_error_in_openais_format(content, status, num_sent):
    life, http, sent = gateway(PORTS)
    async with life, http:
        health = await http.get("/health")
        assert health.status_code == 503
        assert health.json()["models"] == {name: port < 3 for name, port in PORTS.items()}
        models = (await http.get("/v1/models")).json()["data"]
        assert [row["id"] for row in models] == ["A", "A=2", "B"]
        whose = {row["id"]: row["identity"] for row in models}
        assert whose == {name: f"o/{name}@{PORTS[name]}" for name in whose}
        answer = await http.post("/v1/chat/completions", content=content)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(sent) == num_sent


@pytest.mark.parametrize(
    "path",
    [
        "%2e%2e/shutdown",
        "..%2fshutdown",
        "%252e%252e/shutdown",
        "chat/%2e%2e/%2e%2e/shutdown",
        "%2fshutdown",
        "..%5cshutdown",
        "chat%3f/completions",
        "",
    ],
)
async def test_only_routes_of_the_api_reach_a_server(path):
    """What vLLM serves beside /v1 ends it, or lets it sleep."""
    life, http, sent = gateway()
    async with life, http:
        for url in (f"/v1/{path}", f"/v1%2f{path}", f"//v1/{path}"):
            answer = await http.post(url, json={"model": "B"})
            assert answer.status_code in (404, 405)
            assert (await http.get(url)).status_code in (404, 405)
        assert not sent


async def test_the_key_is_checked_and_passed_on():
    life, http, sent = gateway(api_key="secret")
    async with life, http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        for key in ("", "secre", "secret1", "other"):
            http.headers["authorization"] = f"Bearer {key}"
            assert (await http.get("/v1/models")).status_code == 401
            assert (await http.post("/v1/completions", json={"model": "A"})).status_code == 401
        assert not sent
        http.headers["authorization"] = "Bearer secret"
        assert (await http.post("/v1/completions", json={"model": "A"})).status_code == 200
        assert sent[0].headers["authorization"] == "Bearer secret"


def test_a_server_does_not_close_a_connection_before_its_client():
    """A request sent at that moment would be lost."""
    assert SERVER_SETTINGS["timeout_keep_alive"] > LIMITS.keepalive_expiry
