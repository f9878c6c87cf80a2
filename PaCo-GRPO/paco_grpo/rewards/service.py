"""A reward in a process and an environment of its own, over HTTP.

    python -m paco_grpo.rewards.service --reward imagereward --port 8101 [--kwargs '{"batch_size": 16}'] [--device cuda]

For rewards whose package cannot live in the training environment; ``scripts/reward_service.sh`` makes such an
environment and starts this. The run asks for it with ``reward_fn_kwargs={"imagereward": {"server":
"http://127.0.0.1:8101"}}``. Beside the reward's own package it needs fastapi, uvicorn, numpy, pillow, h11 and this
repository on PYTHONPATH. ``GET /health`` says what is served, ``POST /score`` takes what ``wire`` writes.

It listens on the loopback only; another ``--host`` needs a key in the environment variable REWARD_SERVICE_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from paco_grpo.rewards.registry import Reward, build_rewards, short_name
from paco_grpo.rewards.wire import WireError, decode_request, encode_scores

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_UNPROCESSABLE = 422  # the reward failed: asking again would not help, so not a 5xx, which clients try again


class BodyLimit:
    """ASGI middleware: a request body that grows beyond ``limit`` bytes is refused while it arrives."""

    def __init__(self, app: Callable[..., Awaitable[None]], limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        """Pass on, counting what is received."""
        size = 0

        async def counted() -> dict[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise _TooLarge
            return message

        try:
            await self.app(scope, counted if scope["type"] == "http" else receive, send)
        except _TooLarge:
            text = f"the body is larger than {self.limit} bytes; send fewer images at once (request_size)"
            await JSONResponse({"error": text}, 413)(scope, receive, send)


class _TooLarge(Exception):
    pass


def build_app(reward: Reward, name: str, *, api_key: str | None = None, max_body_bytes: int = 256 << 20) -> FastAPI:
    """The service as an application.

    Args:
        reward: The callable; one call at a time, on one thread.
        name: Under which it is asked for.
        api_key: Wanted of every request if given.
        max_body_bytes: Of one request.
    """
    app = FastAPI(title=f"PaCo-RL reward {name}")
    thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def authorized(request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return api_key is None or hmac.compare_digest(given.encode(), api_key.encode())

    async def health(request: Request) -> Response:
        if not authorized(request):
            return _refuse(401, "a valid key is needed: Authorization: Bearer …")
        return JSONResponse({"status": "ok", "reward": name})

    async def score(request: Request) -> Response:
        if not authorized(request):
            return _refuse(401, "a valid key is needed: Authorization: Bearer …")
        body = await request.body()
        try:
            scores = await asyncio.get_running_loop().run_in_executor(thread, _score, reward, body)
        except WireError as error:
            return _refuse(400, str(error))
        except Exception as error:  # a user's reward may raise anything; the run then says so and stops
            logger.exception("the reward failed")
            return _refuse(_UNPROCESSABLE, f"{type(error).__name__}: {error}")
        return Response(scores, media_type="application/json")

    app.add_route("/health", health, methods=["GET"])
    app.add_route("/score", score, methods=["POST"])
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    return app


def _score(reward: Reward, body: bytes) -> bytes:
    images, items = decode_request(body)
    return encode_scores(reward(images, items))


def _refuse(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paco_grpo.rewards.service", description=__doc__.split("\n")[0])
    parser.add_argument("--reward", required=True, help="a reward's name, or package.module:factory")
    parser.add_argument("--kwargs", default="{}", help="JSON object: keyword arguments of its factory")
    parser.add_argument("--device", default="cpu", help="where it computes: cpu, cuda, cuda:1 (default: cpu)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--max-body-mb", type=int, default=256)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve until stopped; returns 2 when that is refused."""
    parser = _parser()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    key = os.environ.get("REWARD_SERVICE_KEY") or None
    if options.host not in LOOPBACK and key is None:
        parser.error(f"--host {options.host} opens the service to others: set REWARD_SERVICE_KEY, or use 127.0.0.1")
    try:
        kwargs = json.loads(options.kwargs)
    except ValueError as error:
        parser.error(f"--kwargs is not JSON: {error}")
    if not isinstance(kwargs, dict):
        parser.error("--kwargs must be a JSON object")
    try:
        rewards = build_rewards({options.reward: 1.0}, {options.reward: kwargs}, options.device)
        reward = rewards[short_name(options.reward)]
        reward.check()
    except RuntimeError as error:  # RewardError, and a judge that does not answer
        print(f"error: {error}", file=sys.stderr)
        return 2
    import uvicorn

    app = build_app(reward, options.reward, api_key=key, max_body_bytes=options.max_body_mb << 20)
    uvicorn.run(app, host=options.host, port=options.port, access_log=False, timeout_keep_alive=75)
    return 0


if __name__ == "__main__":
    sys.exit(main())
