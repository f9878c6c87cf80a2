"""The gateway: one port, each request to the server of its model."""

from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from vllm_server.gateway import build_app


class Upstreams(httpx.AsyncBaseTransport):
    """Servers by port: 1 and 2 serve, 3 is down, 4 hangs, 5 breaks off."""

    def __init__(self):
        self.asked: list[tuple[int, str, dict]] = []
        self.apps = {port: httpx.ASGITransport(self.server(port)) for port in (1, 2)}

    def server(self, port: int) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health():
            return {}

        @app.get("/v1/models")
        async def models():
            return {
                "data": [{"id": name} for name in {1: ["A", "a-lora"], 2: ["B", "private"]}[port]]
            }

        @app.post("/v1/{path:path}")
        async def answer(request: Request, path: str):
            body = await request.json()
            self.asked.append((port, path, dict(request.headers)))
            if body.get("stream"):
                return StreamingResponse(
                    iter([b"data: 1\n\n", b"data: [DONE]\n\n"]), media_type="text/event-stream"
                )
            if body.get("bad"):
                return JSONResponse({"error": {"message": "bad"}}, 400, {"server": "secret"})
            return {"port": port, "model": body["model"]}

        return app

    async def handle_async_request(self, request):
        errors = {3: httpx.ConnectError, 4: httpx.ReadTimeout, 5: httpx.RemoteProtocolError}
        if request.url.port in errors:
            raise errors[request.url.port]("no")
        return await self.apps[request.url.port].handle_async_request(request)


NAMES = {"A": 1, "a-lora": 1, "B": 2, "down": 3, "hangs": 4, "breaks": 5}


@pytest.fixture
def upstreams():
    return Upstreams()


async def client(upstreams, names=("A", "a-lora", "B"), **options):
    urls = {name: f"http://u:{NAMES[name]}" for name in names}
    app = build_app(urls, transport=upstreams, **options)
    return app.router.lifespan_context(app), httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://g"
    )


async def test_requests_go_to_the_server_of_their_model(upstreams):
    lifespan, http = await client(upstreams)
    async with lifespan, http:
        for name in ("A", "a-lora", "B"):
            headers = {"x-request-id": "7", "cookie": "c"}
            answer = await http.post("/v1/chat/completions", json={"model": name}, headers=headers)
            assert answer.json() == {"port": NAMES[name], "model": name}
        _, path, headers = upstreams.asked[-1]
        assert (
            path == "chat/completions"
            and headers["x-request-id"] == "7"
            and "cookie" not in headers
        )
        assert (await http.post("/v1/embeddings", json={"model": "B"})).status_code == 200
        listed = [row["id"] for row in (await http.get("/v1/models")).json()["data"]]
        assert listed == ["A", "a-lora", "B"], "not what is served elsewhere"
        assert (await http.get("/health")).json() == {
            "models": {"A": True, "a-lora": True, "B": True}
        }
        bad = await http.post("/v1/chat/completions", json={"model": "A", "bad": 1})
        assert (
            bad.status_code == 400
            and bad.json()["error"]["message"] == "bad"
            and "server" not in bad.headers
        )
        async with http.stream(
            "POST", "/v1/chat/completions", json={"model": "A", "stream": True}
        ) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert await stream.aread() == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b"{}", 400),
        (b"[" * 100_000, 400),
        (b"\xff", 400),
        (b'{"model": 3}', 404),
        (b'{"model": "C"}', 404),
        (b"x" * (1 << 20) + b"x", 413),
        (b'{"model": "down"}', 502),
        (b'{"model": "hangs"}', 502),
        (b'{"model": "breaks"}', 502),
    ],
)
async def test_what_cannot_be_forwarded_is_an_error_in_openais_format(upstreams, content, status):
    lifespan, http = await client(upstreams, NAMES, max_body_bytes=1 << 20)
    async with lifespan, http:
        health = await http.get("/health")
        assert health.status_code == 503
        assert health.json()["models"] == {name: port < 3 for name, port in NAMES.items()}
        models = (await http.get("/v1/models")).json()["data"]
        assert [row["id"] for row in models] == ["A", "a-lora", "B"]
        answer = await http.post("/v1/chat/completions", content=content)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert not upstreams.asked


@pytest.mark.parametrize(
    "path", ["/v1/../health", "/v1/%2e%2e/health", "/v1//health", "/v1/x/", "/v1/%00", "/v1/a%0ab"]
)
async def test_no_path_leads_out_of_v1(upstreams, path):
    """httpx would tidy them up first, so the gateway gets them as a server hands them over."""
    app = build_app({"A": "http://u:1"}, transport=upstreams)
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "headers": [],
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
    }
    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"model": "A"}'}

    async def send(message):
        sent.append(message)

    async with app.router.lifespan_context(app):
        await app(scope, receive, send)
    assert sent[0]["status"] == 404 and not upstreams.asked


async def test_the_key_is_checked_and_passed_on(upstreams):
    lifespan, http = await client(upstreams, api_key="secret")
    async with lifespan, http:
        assert (await http.get("/health")).status_code == 200
        for path in ("/v1/models", "/v1/unknown", "/docs"):
            assert (await http.get(path)).status_code == 401
        assert (
            await http.post("/v1/completions", json={"model": "A"})
        ).status_code == 401 and not upstreams.asked
        http.headers["authorization"] = "Bearer secret"
        assert (await http.post("/v1/completions", json={"model": "A"})).status_code == 200
        assert upstreams.asked[-1][2]["authorization"] == "Bearer secret"
        assert (await http.get("/docs")).status_code == 404
