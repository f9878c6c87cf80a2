"""The gateway: one port in front of several models and their replicas.

``launch.sh`` starts it where it is needed. Standalone, for example for servers on several machines:

    python -m vllm_server.gateway_fastapi --upstream Judge=http://node1:8000 --upstream Judge=http://node2:8000

With VLLM_API_KEY, every route except /health needs the key; callers' keys are passed on to the servers.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from urllib.parse import urlsplit

import aiohttp
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paco_grpo.asgi import SERVER_SETTINGS, KeyGuard, unknown_route
from vllm_server.gateway.forwarding import Forwarder
from vllm_server.gateway.metrics import Metrics
from vllm_server.gateway.replicas import Replicas

CHAT_PATH = "/v1/chat/completions"
_ROUTES = "POST /v1/chat/completions (and the engine's other /v1/…), GET /, GET /v1/models, GET /health, GET /metrics"
_ROUTED = re.compile(r"/v1/[\w/-]+")  # no dots: /v1/../x is another route of the engine
_PR_SET_PDEATHSIG = 1  # Linux: prctl(2)
_SETTINGS = "PACO_GATEWAY_SETTINGS"  # passes them to worker processes


@dataclass(frozen=True)
class GatewaySettings:
    """Models, address and limits. The API key is not part of it."""

    models: dict[str, list[str]]  # served name -> URLs of its replicas (an adapter has its base's)
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_concurrent: int = 1024  # over all workers
    max_body_mb: float = 32.0
    request_timeout: float = 600.0  # s until an answer begins, and between its parts
    drain: float = 15.0  # s for requests in progress when it ends
    probe_interval: float = 1.0  # s between two health checks of a replica
    probe_timeout: float = 5.0  # s
    metrics_folder: str | None = None


def read_upstreams(entries: Sequence[str]) -> dict[str, list[str]]:
    """``name=url`` entries; entries with the same name are replicas. Raises ValueError naming the entry."""
    models: dict[str, list[str]] = {}
    for entry in entries:
        name, _, url = entry.rpartition("=")
        address = urlsplit(url)
        if not (name and address.scheme == "http" and address.hostname and address.port):
            raise ValueError(f"--upstream must be NAME=http://HOST:PORT, got {entry!r}")
        urls = models.setdefault(name, [])
        if url.rstrip("/") in urls:
            raise ValueError(f"--upstream {entry!r} is given twice")
        urls.append(url.rstrip("/"))
    return models


class Shortcut:
    """ASGI middleware that sends every ``POST /v1/…`` straight to the forwarder: chat, completions, embeddings, ….

    FastAPI's layers would add 0.11 ms to each, about three times the time needed to choose the replica.
    """

    def __init__(self, app, forwarder: Forwarder):
        self._app, self._forwarder = app, forwarder

    async def __call__(self, scope, receive, send) -> None:
        routed = scope["type"] == "http" and scope["method"] == "POST" and _ROUTED.fullmatch(scope["path"])
        await (self._forwarder if routed else self._app)(scope, receive, send)


def create_app(settings: GatewaySettings | None = None, environment: Mapping[str, str] = os.environ) -> FastAPI:
    """The application; a worker process reads its settings from the environment."""
    settings = settings or GatewaySettings(**json.loads(environment[_SETTINGS]))
    key, started = environment.get("VLLM_API_KEY") or None, int(time.time())
    metrics = Metrics(settings.metrics_folder)
    replicas = Replicas(settings.models, metrics, settings.probe_interval, settings.probe_timeout)
    in_flight_per_worker = -(-settings.max_concurrent // settings.workers)
    max_body_bytes = int(settings.max_body_mb * (1 << 20))
    forwarder = Forwarder(replicas, metrics, in_flight_per_worker, max_body_bytes, settings.request_timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _end_with_supervisor()
        async with aiohttp.ClientSession(
            # Servers close idle connections after 75 s (launch sets that); ours close first, so none is closed in use.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept-encoding": "identity"},
        ) as session:
            forwarder.session = session
            async with replicas.probed(session):
                yield

    app = FastAPI(title="PaCo-RL gateway", version="1", lifespan=lifespan)

    @app.post(CHAT_PATH)
    async def chat(body: dict):
        """OpenAI's chat completion by a replica of the `model` in the body; events where `stream` is true.

        The engine's other `POST /v1/…` routes (completions, embeddings, …) are passed on in the same way.
        """
        raise NotImplementedError  # Shortcut answers

    @app.get("/v1/models")
    async def models():
        """The served models, adapters included."""
        row = {"object": "model", "created": started, "owned_by": "paco-rl"}
        return JSONResponse({"object": "list", "data": [{"id": name, **row} for name in settings.models]})

    @app.get("/")
    async def index():
        """What answers here."""
        return JSONResponse({"service": "PaCo-RL gateway", "models": list(settings.models), "routes": _ROUTES})

    @app.get("/health")
    async def health():
        """200 when every model has a replica that can be asked, else 503. Needs no key."""
        serving = replicas.serving()
        rows = {name: {"replicas": len(settings.models[name]), "serving": count} for name, count in serving.items()}
        healthy = all(serving.values())
        return JSONResponse({"status": "ok" if healthy else "unhealthy", "models": rows}, 200 if healthy else 503)

    @app.get("/metrics")
    async def prometheus():
        """Metrics in Prometheus' text format."""
        page, kind = await asyncio.to_thread(metrics.page)
        return Response(page, media_type=kind)

    app.add_exception_handler(HTTPException, unknown_route(_ROUTES))
    app.add_middleware(Shortcut, forwarder=forwarder)
    if key:  # added last: outermost
        app.add_middleware(KeyGuard, key=key, on_refusal=lambda kind: metrics.errors.labels(kind).inc())
    return app


def _end_with_supervisor() -> None:
    """A worker gets SIGTERM when its supervisor ends: it would serve on, and hold the port, unknown to anybody."""
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor.pid:  # it ended before
            os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: GatewaySettings) -> None:
    """Runs until SIGTERM or SIGINT; requests in progress are then answered, for ``drain`` seconds at most."""
    # After a clean end uvicorn raises the signal again: that is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="paco-gateway-") as folder:
        if settings.workers > 1:
            settings = replace(settings, metrics_folder=folder)
        os.environ[_SETTINGS] = json.dumps(asdict(settings))
        uvicorn.run(
            "vllm_server.gateway_fastapi:create_app",
            factory=True,
            host=settings.host,
            port=settings.port,
            workers=settings.workers,
            loop="uvloop",
            **SERVER_SETTINGS,
            timeout_graceful_shutdown=max(1, round(settings.drain)),
            # On a busy machine a worker needs longer than uvicorn's 5 s to start, and would be killed again and again.
            timeout_worker_healthcheck=30,
        )


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--upstream", action="append", required=True, metavar="NAME=http://HOST:PORT", help="a replica; repeatable"
    )
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--max-concurrent", type=int, help="more requests at once are refused with 429")
    parser.add_argument("--max-body-mb", type=float)
    for name in ("--request-timeout", "--drain", "--probe-interval", "--probe-timeout"):
        parser.add_argument(name, type=float, metavar="S")
    given = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        models = read_upstreams(given.pop("upstream"))
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    serve(GatewaySettings(models, **given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
