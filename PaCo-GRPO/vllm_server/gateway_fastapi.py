"""The gateway: one port in front of several models and their replicas.

``launch.sh`` starts it where it is needed. By itself (for servers on other machines, say):

    python -m vllm_server.gateway_fastapi --upstream Judge=http://node1:8000 --upstream Judge=http://node2:8000

VLLM_API_KEY, where set, is then needed on every route but /health; callers' keys are passed on to the servers.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from vllm_server.gateway import pages
from vllm_server.gateway.errors import ApiError
from vllm_server.gateway.forwarding import ChatForwarder
from vllm_server.gateway.guard import KeyGuard
from vllm_server.gateway.metrics import Metrics
from vllm_server.gateway.replicas import Replicas
from vllm_server.gateway.settings import GatewaySettings, read_upstreams

CHAT_PATH = "/v1/chat/completions"
_SETTINGS = "PACO_GATEWAY_SETTINGS"  # how worker processes learn them


class Forwarded(Response):
    """What the chat route returns: FastAPI calls it with the connection, whose body was not read yet."""

    def __init__(self, forwarder: ChatForwarder):
        self._forwarder, self.background = forwarder, None

    async def __call__(self, scope, receive, send) -> None:
        await self._forwarder(scope, receive, send)


class ChatLane:
    """ASGI middleware: chat requests go straight to the forwarder.

    It answers as the chat route does; FastAPI's layers in between would cost 0.11 ms a request, about three times as
    much as finding the model and choosing the replica.
    """

    def __init__(self, app, gateway: "Gateway"):
        self._app, self._gateway = app, gateway

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"] == CHAT_PATH and scope["method"] == "POST":
            await self._gateway.forwarded(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Gateway:
    """The routes' state, made when a worker starts and its event loop runs."""

    def __init__(self, settings: GatewaySettings):
        self.settings, self.started = settings, int(time.time())
        self.metrics = Metrics(settings.metrics_folder)
        self.forwarded: Forwarded | None = None
        self.replicas: Replicas | None = None

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """One pooled client for all requests of this worker."""
        settings = self.settings
        # Servers close idle connections after 75 s (launch says so); ours go first, or a request would meet the end.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept-encoding": "identity"},
        ) as session:
            self.replicas = Replicas(
                settings.models, self.metrics, settings.probe_interval_s, settings.probe_timeout_s
            )
            self.forwarded = Forwarded(ChatForwarder(settings, self.replicas, session, self.metrics))
            async with self.replicas.watched(session):
                yield

    async def chat(self, request: Request) -> Response:
        """Passed on to a replica of the model that the body names, as it is."""
        return self.forwarded

    async def models(self) -> JSONResponse:
        """The served models, adapters too."""
        rows = [
            {"id": name, "object": "model", "created": self.started, "owned_by": "paco-rl"}
            for name in self.settings.models
        ]
        return JSONResponse({"object": "list", "data": rows})

    async def health(self) -> JSONResponse:
        """200 when every model has a replica that can be asked, else 503. Needs no key."""
        serving = self.replicas.serving()
        healthy = all(serving.values())
        rows = {
            name: {"replicas": len(self.settings.models[name]), "serving": count} for name, count in serving.items()
        }
        return JSONResponse({"status": "ok" if healthy else "unhealthy", "models": rows}, 200 if healthy else 503)

    async def prometheus(self) -> Response:
        """Metrics in Prometheus' text format."""
        page, kind = await asyncio.to_thread(self.metrics.page)
        return Response(page, media_type=kind)


def create_app(settings: GatewaySettings | None = None, environment: Mapping[str, str] = os.environ) -> FastAPI:
    """The application; a worker process finds its settings in the environment."""
    gateway = Gateway(settings or GatewaySettings.from_json(environment[_SETTINGS]))
    key = environment.get("VLLM_API_KEY") or None
    app = FastAPI(title="PaCo-RL gateway", version="1", lifespan=gateway.lifespan, description=pages.DESCRIPTION)
    pages.describe(app, guarded=key is not None)
    app.add_api_route(CHAT_PATH, gateway.chat, methods=["POST"], **pages.chat(list(gateway.settings.models)))
    app.add_api_route("/v1/models", gateway.models, methods=["GET"], **pages.MODELS)
    app.add_api_route("/health", gateway.health, methods=["GET"], **pages.HEALTH)
    app.add_api_route("/metrics", gateway.prometheus, methods=["GET"], **pages.METRICS)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(ChatLane, gateway=gateway)
    if key:  # added last: outermost
        app.add_middleware(KeyGuard, key=key, metrics=gateway.metrics)
    return app


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}; this gateway answers {pages.ROUTES}"
    body = ApiError(message, error.status_code, "no_such_route").body()
    return Response(body, error.status_code, error.headers, media_type="application/json")


def serve(settings: GatewaySettings) -> None:
    """Run until SIGTERM or SIGINT; requests in hand are then answered, for ``drain_s`` at most."""
    # After its own clean end uvicorn raises the signal again: that is our end too, not a failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="paco-gateway-") as folder:
        if settings.workers > 1:
            settings = replace(settings, metrics_folder=folder)
        os.environ[_SETTINGS] = settings.to_json()
        uvicorn.run(
            "vllm_server.gateway_fastapi:create_app",
            factory=True,
            host=settings.host,
            port=settings.port,
            workers=settings.workers,
            loop="uvloop",
            http="httptools",
            ws="none",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=4096,
            timeout_keep_alive=75,  # callers keep their connections between two batches of questions
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            # A worker on a busy machine needs longer than uvicorn's 5 s to import this; it would be killed, again and again.
            timeout_worker_healthcheck=30,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = GatewaySettings({})
    parser.add_argument("--upstream", action="append", required=True, metavar="NAME=http://HOST:PORT",
                        help="a replica of a model; once for each")  # fmt: skip
    parser.add_argument("--host", default=default.host)
    parser.add_argument("--port", type=int, default=default.port)
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--max-concurrent", type=int, default=default.max_concurrent, help="more are refused with 429")
    parser.add_argument("--max-body-mb", type=float, default=default.max_body_bytes / (1 << 20))
    parser.add_argument("--request-timeout", type=float, default=default.request_timeout_s, metavar="S")
    parser.add_argument("--drain", type=float, default=default.drain_s, metavar="S")
    parser.add_argument("--probe-interval", type=float, default=default.probe_interval_s, metavar="S")
    parser.add_argument("--probe-timeout", type=float, default=default.probe_timeout_s, metavar="S")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        models = read_upstreams(given.upstream)
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    serve(
        GatewaySettings(
            models, given.host, given.port, given.workers, given.max_concurrent, int(given.max_body_mb * (1 << 20)),
            given.request_timeout, drain_s=given.drain, probe_interval_s=given.probe_interval,
            probe_timeout_s=given.probe_timeout,
        )
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
