"""The gateway: one port, each request once to the server of its model."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from serving_tools import body, top_logprobs

from paco_judge.verdict import p_yes_from_top_logprobs
from vllm_server import transformers_server
from vllm_server.gateway import build_app

PORTS = {"A": 1, "A=2": 1, "B": 2, "down": 3, "hangs": 4, "breaks": 5}


class Upstreams(httpx.AsyncBaseTransport):
    """Servers by port: 1 and 2 serve, 3 is down, 4 hangs, 5 breaks off."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        listed = {1: ["A", "A=2"], 2: ["private", "B"]}
        self.apps = {port: httpx.ASGITransport(serve(port, listed[port])) for port in listed}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.requests.append(request)
        errors = {3: httpx.ConnectError, 4: httpx.ReadTimeout, 5: httpx.RemoteProtocolError}
        if request.url.port in errors:
            raise errors[request.url.port]("no")
        return await self.apps[request.url.port].handle_async_request(request)


def serve(port: int, names: list[str]) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health():
        return {}

    @app.get("/v1/models")
    async def models():
        return {"data": [{"id": name} for name in names]}

    @app.post("/v1/{path:path}")
    async def answer(request: Request, path: str):
        asked = await request.json()
        if asked.get("stream"):
            return StreamingResponse(iter(["data: 1\n\n", "data: [DONE]\n\n"]))
        if asked.get("bad"):
            return JSONResponse({"error": {"message": "bad"}}, 400, {"server": "secret"})
        return {"port": port, "path": path, "asked": asked}

    return app


def gateway(transport, names=("A", "A=2", "B"), api_key=None) -> tuple:
    """Its life, and a client that asks it."""
    urls = {name: f"http://u:{PORTS[name]}" for name in names}
    app = build_app(urls, api_key, transport)
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://g")
    return app.router.lifespan_context(app), client


async def test_each_request_goes_once_to_the_server_of_its_model():
    upstreams = Upstreams()
    life, http = gateway(upstreams)
    async with life, http:
        questions = []
        for index in range(12):
            model = ("A", "B", "A=2")[index % 3]
            questions.append({"model": model, "messages": [index], "max_tokens": index + 1})
        paths = ["chat/completions", "embeddings", "completions", "rerank"] * 3
        headers = {"x-request-id": "7", "cookie": "c"}
        posts = []
        for path, question in zip(paths, questions, strict=True):
            posts.append(http.post(f"/v1/{path}", json=question, headers=headers))
        for path, question, answer in zip(
            paths, questions, await asyncio.gather(*posts), strict=True
        ):
            port = PORTS[question["model"]]
            assert answer.json() == {"port": port, "path": path, "asked": question}
        assert len(upstreams.requests) == len(questions)
        for request in upstreams.requests:
            assert request.headers["x-request-id"] == "7"
            assert "cookie" not in request.headers
            # Answers wait for all earlier questions; callers have deadlines of their own.
            assert request.extensions["timeout"]["read"] >= 600
            assert request.extensions["timeout"]["pool"] is None

        listed = (await http.get("/v1/models")).json()["data"]
        assert [row["id"] for row in listed] == ["A", "A=2", "B"]
        assert (await http.get("/health")).json() == {"models": {"A": True, "A=2": True, "B": True}}
        bad = await http.post("/v1/chat/completions", json={"model": "A", "bad": 1})
        assert (bad.status_code, bad.json()["error"]["message"]) == (400, "bad")
        assert "server" not in bad.headers
        stream = {"model": "A", "stream": True}
        answer = await http.post("/v1/chat/completions", json=stream)
        assert answer.content == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("content", "status", "num_sent"),
    [
        (b"{", 400, 0),
        (b"[1]", 400, 0),
        (b"\xff", 400, 0),
        (b'{"model": "C"}', 404, 0),
        (b'{"model": "down"}', 502, 1),
        (b'{"model": "hangs"}', 502, 1),
        (b'{"model": "breaks"}', 502, 1),
    ],
)
async def test_what_cannot_be_answered_is_an_error_in_openais_format(content, status, num_sent):
    upstreams = Upstreams()
    life, http = gateway(upstreams, PORTS)
    async with life, http:
        health = await http.get("/health")
        assert health.status_code == 503
        assert health.json()["models"] == {name: port < 3 for name, port in PORTS.items()}
        models = (await http.get("/v1/models")).json()["data"]
        assert [row["id"] for row in models] == ["A", "A=2", "B"]
        answer = await http.post("/v1/chat/completions", content=content)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(upstreams.requests) == num_sent


async def test_the_key_is_checked_and_passed_on():
    upstreams = Upstreams()
    life, http = gateway(upstreams, api_key="secret")
    async with life, http:
        assert (await http.get("/health")).status_code == 200
        for key in ("", "secre", "secret1", "other"):
            http.headers["authorization"] = f"Bearer {key}"
            for path in ("/v1/models", "/v1/unknown", "/docs"):
                assert (await http.get(path)).status_code == 401
            assert (await http.post("/v1/completions", json={"model": "A"})).status_code == 401
        assert not upstreams.requests
        http.headers["authorization"] = "Bearer secret"
        assert (await http.post("/v1/completions", json={"model": "A"})).status_code == 200
        assert upstreams.requests[0].headers["authorization"] == "Bearer secret"


async def test_scores_of_a_judge_behind_the_gateway(scorer, pairs, scores):
    """Asked at once, as a training asks, through both servers."""
    worker = transformers_server.BatchWorker(scorer, 1024)
    judge = transformers_server.build_app(worker, "Judge")
    app = build_app({"Judge": "http://j"}, transport=httpx.ASGITransport(judge))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g", timeout=120)
    async with (
        judge.router.lifespan_context(judge),
        app.router.lifespan_context(app),
        client as http,
    ):
        posts = [http.post("/v1/chat/completions", json=body(pair)) for pair in pairs]
        for answer, score in zip(await asyncio.gather(*posts), scores, strict=True):
            assert p_yes_from_top_logprobs(top_logprobs(answer)) == pytest.approx(score, abs=1e-5)
