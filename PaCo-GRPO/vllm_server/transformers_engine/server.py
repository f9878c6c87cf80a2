"""The HTTP side of the transformers engine: /v1/models, /v1/chat/completions, /health."""

import asyncio
import hmac
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from vllm_server.transformers_engine.batching import Batcher, Job, Token
from vllm_server.transformers_engine.model import JudgeModel
from vllm_server.transformers_engine.protocol import RequestError, parse_request

logger = logging.getLogger(__name__)


class Api:
    """The routes' state: what is served, under which names, within which limits."""

    def __init__(
        self,
        model: JudgeModel,
        batcher: Batcher,
        names: tuple[str, ...],
        adapters: Mapping[str, str],
        max_body_bytes: int,
        api_key: str | None,
    ):
        self.model, self.batcher = model, batcher
        self.names, self.adapters = (*names, *adapters), adapters
        self.max_body_bytes, self.api_key = max_body_bytes, api_key
        self.started = int(time.time())
        self._fragments: dict[int, str] = {}
        # A random number for each answer would cost a system call, in which the engine's thread takes over.
        self._answer_ids = (f"chatcmpl-{uuid.uuid4().hex}-{number}" for number in itertools.count())

    async def health(self, request: Request) -> Response:
        alive = self.batcher.alive()
        return JSONResponse({"status": "ok" if alive else "a thread of the engine has ended"}, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        limit = self.model.max_model_len
        rows = [
            {"id": name, "object": "model", "created": self.started, "owned_by": "paco-rl", "max_model_len": limit}
            | ({"root": self.adapters[name], "parent": self.names[0]} if name in self.adapters else {})
            for name in self.names
        ]
        return JSONResponse({"object": "list", "data": rows})

    async def chat(self, request: Request) -> Response:
        self._authorize(request)
        try:
            body = orjson.loads(await self._body(request))
        except ValueError as error:
            raise RequestError(f"the body is not JSON: {error}") from error
        job = Job(parse_request(body, self.names, self.adapters))
        self.batcher.submit(job)
        answer_id, created = next(self._answer_ids), int(time.time())
        head = f'{{"id":"{answer_id}","created":{created},"model":{json.dumps(body["model"])}'
        if job.request.stream:
            # The first token is awaited here, so that a refusal is still an HTTP error.
            first = await self._next(job)
            return StreamingResponse(self._stream(job, first, head), media_type="text/event-stream")
        tokens: list[Token] = []
        try:
            while (more := await self._next(job)) is not None:
                tokens += more
        except asyncio.CancelledError:
            job.cancelled = True
            raise
        return Response(self._complete(job, tokens, head), media_type="application/json")

    def _authorize(self, request: Request) -> None:
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise RequestError("a valid API key is needed: Authorization: Bearer …", status=401, code="invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """The request body, refused as soon as it is known to be too large."""
        limit = self.max_body_bytes
        too_large = RequestError(f"the body is larger than {limit} bytes; send smaller images", status=413)
        try:
            if int(request.headers.get("content-length", 0)) > limit:
                raise too_large
        except ValueError as error:
            raise RequestError("content-length is not a number") from error
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)

    async def _next(self, job: Job) -> list[Token] | None:
        item = await job.tokens.get()
        if isinstance(item, RequestError):
            raise item
        if isinstance(item, Exception):
            raise RequestError(f"the model's forward failed: {type(item).__name__}: {item}", status=500) from item
        return item

    def _complete(self, job: Job, tokens: list[Token], head: str) -> str:
        text = self.model.text([token.id for token in tokens])
        return (
            f'{head},"object":"chat.completion","choices":[{{"index":0,"message":{{"role":"assistant","content":'
            f'{json.dumps(text)}}},"logprobs":{self._logprobs(job, tokens)},"finish_reason":"{job.finish_reason}"}}],'
            f'"usage":{self._usage(job, len(tokens))}}}'
        )

    async def _stream(self, job: Job, first: list[Token] | None, head: str) -> AsyncIterator[str]:
        """Server-sent events; a character that spans tokens is held back until it is whole."""
        head = f'data: {head},"object":"chat.completion.chunk"'
        tokens: list[Token] = []
        pending: list[Token] = []
        sent = ""
        yield _chunk(head, '{"role":"assistant","content":""}', "null", "null")
        try:
            part = first
            while part is not None:
                tokens += part
                pending += part
                text = self.model.text([token.id for token in tokens])
                if not text.endswith("\ufffd"):
                    delta = f'{{"content":{json.dumps(text[len(sent) :])}}}'
                    yield _chunk(head, delta, self._logprobs(job, pending), "null")
                    sent, pending = text, []
                part = await self._next(job)
            rest = self.model.text([token.id for token in tokens])[len(sent) :]
            delta = f'{{"content":{json.dumps(rest)}}}' if rest else "{}"
            yield _chunk(head, delta, self._logprobs(job, pending), f'"{job.finish_reason}"')
            if job.request.include_usage:
                yield f'{head},"choices":[],"usage":{self._usage(job, len(tokens))}}}\n\n'
        except RequestError as error:
            yield f"data: {json.dumps(error.body())}\n\n"
        finally:
            job.cancelled = True  # no effect once it has ended; otherwise the reader has left
        yield "data: [DONE]\n\n"

    def _usage(self, job: Job, count: int) -> str:
        total = job.prompt_tokens + count
        return f'{{"prompt_tokens":{job.prompt_tokens},"completion_tokens":{count},"total_tokens":{total}}}'

    def _logprobs(self, job: Job, tokens: list[Token]) -> str:
        if job.request.top_logprobs is None or not tokens:
            return "null"
        entries = ",".join(
            f'{self._fragment(token.id)}{token.logprob!r},"top_logprobs":['
            + ",".join([f"{self._fragment(each)}{logprob!r}}}" for each, logprob in token.top])
            + "]}"
            for token in tokens
        )
        return f'{{"content":[{entries}]}}'

    def _fragment(self, token: int) -> str:
        """The part of a log-probability entry that depends on the token alone."""
        fragment = self._fragments.get(token)
        if fragment is None:
            text = self.model.token_text(token)
            listed = json.dumps({"token": text, "bytes": list(text.encode())})
            fragment = self._fragments[token] = listed[:-1] + ',"logprob":'
        return fragment


def build_app(
    model: JudgeModel,
    names: tuple[str, ...],
    *,
    adapters: Mapping[str, str] | None = None,
    max_batch: int = 64,
    max_body_bytes: int = 32 << 20,
    api_key: str | None = None,
) -> Starlette:
    """The engine as an application; its threads live from start-up to shut-down.

    ``names``: under which the base is served; ``adapters``: folder of each adapter by its name. Plain Starlette:
    FastAPI's layers cost more per request than the answer itself, and nothing here uses them.
    """
    batcher = Batcher(model, max_batch=max_batch)

    @asynccontextmanager
    async def lifespan(app: Starlette):
        batcher.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(batcher.stop)

    api = Api(model, batcher, names, adapters or {}, max_body_bytes, api_key)
    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
    ]
    handlers = {RequestError: _refuse, HTTPException: _http_error}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


async def _refuse(request: Request, error: RequestError) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    known = "GET /health, GET /v1/models, POST /v1/chat/completions"
    message = f"{request.method} {request.url.path}: {error.detail}; this engine answers {known}"
    return JSONResponse(RequestError(message, status=error.status_code).body(), error.status_code, error.headers)


def _chunk(head: str, delta: str, logprobs: str, finish_reason: str) -> str:
    choice = f'{{"index":0,"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish_reason}}}'
    return f'{head},"choices":[{choice}]}}\n\n'
