"""The engine's HTTP side: ``/v1/models``, ``/v1/chat/completions``, ``/health``."""

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paco_grpo.asgi import ApiError, Bodies, KeyGuard, refuse, unknown_route, until_caller_leaves
from vllm_server.transformers_engine.batching import Batcher, Job, Token
from vllm_server.transformers_engine.model import JudgeModel
from vllm_server.transformers_engine.protocol import parse_request

_ROUTES = "GET /health, GET /v1/models, POST /v1/chat/completions"


@dataclass
class Api:
    """The routes."""

    model: JudgeModel
    batcher: Batcher
    base: str
    names: tuple[str, ...]  # everything served
    adapters: Collection[str]  # which of them are adapters
    max_images: int  # in a request
    bodies: Bodies
    started: int = field(default_factory=lambda: int(time.time()))
    _token_entries: dict[int, dict] = field(default_factory=dict)

    def __post_init__(self):
        # A random id per answer would cost a system call each.
        self._answer_ids = (f"chatcmpl-{uuid.uuid4().hex}-{number}" for number in itertools.count())

    async def health(self, request: Request) -> Response:
        """200 while requests are worked on, else 503."""
        alive = self.batcher.alive()
        return JSONResponse({"status": "ok" if alive else "the engine has stopped working"}, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        """The served names, adapters with their base as ``parent``."""
        limit = self.model.max_model_len
        rows = [
            {"id": name, "object": "model", "created": self.started, "owned_by": "paco-rl", "max_model_len": limit}
            | ({"parent": self.base} if name in self.adapters else {})
            for name in self.names
        ]
        return JSONResponse({"object": "list", "data": rows})

    async def chat(self, request: Request) -> Response:
        """A chat completion, or its event stream. Raises ApiError."""
        async with self.bodies.read(request.scope, request.receive) as body:
            job = Job(parse_request(body, self.names, self.adapters, self.max_images))
            del body
            self.batcher.submit(job)
            received = aiter(job)
            try:
                # The first token of a stream is awaited here, so that a refusal is still an HTTP error.
                work = _first(received) if job.request.stream else _all(received)
                tokens = await until_caller_leaves(request.receive, work)
            except BaseException:
                job.cancel()
                raise
        answer = {"id": next(self._answer_ids), "created": int(time.time()), "model": job.request.model}
        if job.request.stream:
            events = self._events(job, tokens, received, answer | {"object": "chat.completion.chunk"})
            return StreamingResponse(events, media_type="text/event-stream")
        message = {"role": "assistant", "content": self._text(tokens)}
        logprobs = self._logprobs(job, tokens)
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": job.finish_reason}
        answer |= {"object": "chat.completion", "choices": [choice], "usage": _usage(job, tokens)}
        return Response(orjson.dumps(answer), media_type="application/json")

    async def _events(
        self, job: Job, tokens: list[Token], received: AsyncIterator[Token], head: dict
    ) -> AsyncIterator[bytes]:
        """Server-sent events; a character that spans several tokens is held back until it is complete."""

        def event(delta: dict, entries: list[Token], finish_reason: str | None = None) -> bytes:
            logprobs = self._logprobs(job, entries)
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            return _event(head | {"choices": [choice]})

        sent, counted = "", 0  # text and number of tokens already sent
        yield event({"role": "assistant", "content": ""}, [])
        try:
            more = True
            while more:
                text = self._text(tokens)
                if not text.endswith("\ufffd"):
                    yield event({"content": text[len(sent) :]}, tokens[counted:])
                    sent, counted = text, len(tokens)
                more = await anext(received, None)
                if more:
                    tokens.append(more)
            rest = self._text(tokens)[len(sent) :]
            yield event({"content": rest} if rest else {}, tokens[counted:], job.finish_reason)
            if job.request.include_usage:
                yield _event(head | {"choices": [], "usage": _usage(job, tokens)})
        except ApiError as error:
            yield _event(error.body())
        finally:
            job.cancel()  # the reader may have left
        yield b"data: [DONE]\n\n"

    def _text(self, tokens: list[Token]) -> str:
        return self.model.tokenizer.decode([token.id for token in tokens], skip_special_tokens=True)

    def _logprobs(self, job: Job, tokens: list[Token]) -> dict | None:
        if job.request.top_logprobs is None or not tokens:
            return None
        content = [
            self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*top) for top in token.top]}
            for token in tokens
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict:
        entry = self._token_entries.get(token)
        if entry is None:
            text = self.model.tokenizer.decode([token])  # U+FFFD where the token is a part of a character
            entry = self._token_entries[token] = {"token": text, "bytes": list(text.encode())}
        return entry | {"logprob": logprob}


def build_app(
    model: JudgeModel,
    names: tuple[str, ...],
    *,
    adapters: Collection[str] = (),
    max_batch: int = 64,
    max_images: int = 16,
    max_body_bytes: int = 32 << 20,
    api_key: str | None = None,
) -> Starlette:
    """The engine as an application; its threads live from start-up to shutdown.

    Plain Starlette: FastAPI's layers cost more per request than the answer itself.

    Args:
        names: Served names of the base.
        adapters: Names of the adapters.
        api_key: Needed on every route except ``/health``.
    """
    batcher = Batcher(model, max_batch=max_batch)

    @asynccontextmanager
    async def lifespan(app: Starlette):
        batcher.start()
        yield
        await batcher.stop()

    api = Api(model, batcher, names[0], (*names, *adapters), adapters, max_images, Bodies(max_body_bytes))
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes, exception_handlers={ApiError: refuse, HTTPException: unknown_route(_ROUTES)}, lifespan=lifespan
    )
    if api_key:
        app.add_middleware(KeyGuard, key=api_key)
    return app


async def _all(received: AsyncIterator[Token]) -> list[Token]:
    return [token async for token in received]


async def _first(received: AsyncIterator[Token]) -> list[Token]:
    return [await anext(received)]


def _event(content: dict) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _usage(job: Job, tokens: list[Token]) -> dict[str, int]:
    prompt, completion = len(job.prepared), len(tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
