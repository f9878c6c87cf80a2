"""One port for several judges: each request goes to the server of the ``model`` that it names.

    python -m vllm_server.gateway --port 8000 \\
        --upstream NAME=http://127.0.0.1:8001 --upstream NAME=http://127.0.0.1:8002

If VLLM_API_KEY is set, this key is needed on every route except /health, and passed on.
"""

import argparse
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

from paco_grpo.asgi import EXCEPTION_HANDLERS, SERVER_SETTINGS, ApiError, KeyGuard, read_body

_REQUEST_HEADERS = ("authorization", "content-type", "x-request-id")
_ANSWER_HEADERS = ("content-type", "x-request-id")
# An answer begins when the engine has worked on all requests before it; clients have deadlines of
# their own.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0, pool=None)
# A path with empty parts, dots or control characters could lead out of /v1 at the engine.
_PATH = re.compile(r"[\w-]+(/[\w-]+)*", re.ASCII)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0)


def build_app(
    upstreams: Mapping[str, str],
    *,
    api_key: str | None = None,
    max_body_bytes: int = 32 << 20,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """The gateway as an application.

    ``upstreams`` are the servers' URLs by served name. ``transport`` leads to the servers in
    tests.
    """
    http: httpx.AsyncClient

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal http
        options: dict[str, Any] = {"transport": transport} if transport else {"limits": _LIMITS}
        # trust_env: a proxy of the environment is not for servers of this machine.
        async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False, **options) as http:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=EXCEPTION_HANDLERS)
    if api_key:
        app.add_middleware(KeyGuard, key=api_key)

    @app.get("/health")
    async def health() -> Response:
        states = {}
        for name, url in upstreams.items():
            try:
                states[name] = (await http.get(f"{url}/health", timeout=5)).status_code == 200
            except httpx.HTTPError:
                states[name] = False
        return JSONResponse({"models": states}, 200 if all(states.values()) else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """What the servers list, without names that are not routed here."""
        rows = {}
        for url in dict.fromkeys(upstreams.values()):
            try:
                headers = _chosen(request.headers, _REQUEST_HEADERS)
                answer = await http.get(f"{url}/v1/models", headers=headers, timeout=5)
                rows |= {row["id"]: row for row in answer.json()["data"] if row["id"] in upstreams}
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                continue  # /health says which one is down
        return JSONResponse({"object": "list", "data": list(rows.values())})

    @app.post("/v1/{path:path}")
    async def forward(request: Request, path: str) -> Response:
        if not _PATH.fullmatch(path):
            raise ApiError(f"POST {request.scope['path'][:200]!r}: Not Found", 404)
        body = await read_body(request, max_body_bytes)
        try:
            model = str(json.loads(body)["model"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ApiError("the body must be a JSON object with a model", param="model") from error
        if model not in upstreams:
            message = f"model {model[:200]!r} is not served here; served: {', '.join(upstreams)}"
            raise ApiError(message, 404, param="model", code="model_not_found")
        headers = {"content-type": "application/json"} | _chosen(request.headers, _REQUEST_HEADERS)
        url = f"{upstreams[model]}/v1/{path}"
        try:
            answer = await http.send(
                http.build_request("POST", url, content=body, headers=headers), stream=True
            )
        except httpx.HTTPError as error:
            raise ApiError(
                f"the server of {model!r} did not answer ({error!r}); see /health", 502
            ) from error
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            _chosen(answer.headers, _ANSWER_HEADERS),
            background=BackgroundTask(answer.aclose),
        )

    return app


def _chosen(headers: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def main() -> None:
    """The command, which runs until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--upstream", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--max-body-mb", type=float, default=32)
    arguments = parser.parse_args()
    # A name may hold "=", a URL of ours does not.
    upstreams = dict(entry.rsplit("=", 1) for entry in arguments.upstream)
    limit = int(arguments.max_body_mb * (1 << 20))
    app = build_app(upstreams, api_key=os.environ.get("VLLM_API_KEY") or None, max_body_bytes=limit)
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        timeout_graceful_shutdown=15,
        **SERVER_SETTINGS,
    )


if __name__ == "__main__":
    main()
