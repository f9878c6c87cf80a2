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

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.background import BackgroundTask

from paco_grpo.asgi import EXCEPTION_HANDLERS, SERVER_SETTINGS, ApiError
from paco_judge.pages.keys import KeyGuard

# A server may resolve "..", also as %2e%2e, and then serves more than what is below /v1.
_ROUTE = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_HEADERS = ("authorization", "content-type", "x-request-id")  # that pass in both directions
# An answer begins when the engine has worked on all requests before it; clients have deadlines of
# their own.
_TIMEOUT = httpx.Timeout(600.0, connect=5.0, pool=None)
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0)


def build_app(
    upstreams: Mapping[str, str],
    api_key: str | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> FastAPI:
    """The gateway as an application.

    Args:
        upstreams: The servers' URLs by served name.
        api_key: Needed on every route except ``/health``.
        transport: Leads to the servers in tests.
    """
    http: httpx.AsyncClient

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        nonlocal http
        # trust_env: a proxy of the environment is not for servers of this machine.
        options = {"timeout": _TIMEOUT, "limits": LIMITS, "trust_env": False}
        async with httpx.AsyncClient(transport=transport, **options) as http:
            yield

    async def get(url: str, request: Request) -> httpx.Response | None:
        """A server's answer, if it is a good one."""
        try:
            answer = await http.get(url, headers=_passed(request.headers), timeout=5)
        except httpx.HTTPError:
            return None
        return answer if answer.status_code == 200 else None

    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=EXCEPTION_HANDLERS)
    if api_key:
        app.add_middleware(KeyGuard, key=api_key)

    @app.get("/health")
    async def health(request: Request) -> Response:
        states = {}
        for name, url in upstreams.items():
            states[name] = await get(f"{url}/health", request) is not None
        return JSONResponse({"models": states}, 200 if all(states.values()) else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """What the servers list; /health says which one is down."""
        rows = []
        for name, url in upstreams.items():
            if answer := await get(f"{url}/v1/models", request):
                rows += [row for row in answer.json()["data"] if row["id"] == name]
        return JSONResponse({"object": "list", "data": rows})

    @app.post("/v1/{path:path}")
    async def forward(request: Request, path: str) -> Response:
        if not _ROUTE.fullmatch(path):
            raise ApiError(f"there is no route {path[:200]!r} below /v1", 404)
        body = await request.body()
        try:
            model = str(json.loads(body)["model"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ApiError("the body must be a JSON object with a model", param="model") from error
        if model not in upstreams:
            message = f"model {model[:200]!r} is not served here; served: {', '.join(upstreams)}"
            raise ApiError(message, 404, param="model", code="model_not_found")
        headers = {"content-type": "application/json"} | _passed(request.headers)
        sent = http.build_request(
            "POST", f"{upstreams[model]}/v1/{path}", content=body, headers=headers
        )
        try:
            answer = await http.send(sent, stream=True)
        except httpx.HTTPError as error:
            message = f"the server of {model!r} did not answer ({error!r}); see /health"
            raise ApiError(message, 502) from error
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            _passed(answer.headers),
            background=BackgroundTask(answer.aclose),
        )

    return app


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _HEADERS if name in headers}


def main() -> None:
    """The command, which runs until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--upstream", action="append", required=True, metavar="NAME=URL")
    arguments = parser.parse_args()
    # A name may hold "=", a URL of ours does not.
    upstreams = dict(entry.rsplit("=", 1) for entry in arguments.upstream)
    app = build_app(upstreams, os.environ.get("VLLM_API_KEY"))
    uvicorn.run(app, host=arguments.host, port=arguments.port, **SERVER_SETTINGS)


if __name__ == "__main__":
    main()
