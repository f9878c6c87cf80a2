"""Passes a request to a replica of its model and the answer back, as a plain ASGI application.

A whole answer is collected before it is sent, so that a replica that dies in the middle costs only a second try on
another; an event stream is passed on as it comes. The body is passed on as it was read; it is parsed for ``model``.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator

import aiohttp
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from paco_grpo.asgi import BODY_S, ApiError, Bodies, until_caller_leaves
from vllm_server.gateway.metrics import UNKNOWN, Metrics
from vllm_server.gateway.replicas import Replica, Replicas

try:
    from orjson import loads  # several times faster on a request with images
except ImportError:  # in vLLM's environment

    def loads(text: bytes):
        """As strict as orjson: NaN and Infinity are no JSON."""
        return json.loads(text, parse_constant=_no_constant)

    def _no_constant(name: str):
        raise ValueError(f"{name} is no JSON")


logger = logging.getLogger(__name__)

_REQUEST_HEADERS = {b"authorization", b"content-type", b"x-request-id", b"traceparent", b"tracestate"}
_ANSWER_HEADERS = ("content-type", "retry-after", "x-request-id")
_FAILED = (500, 502, 503, 504)
_TRIES = 2


class ReplicaFailed(Exception):
    """A replica gave no useful answer, and nothing was sent to the caller. ``answer``: its error, if it gave one."""

    def __init__(self, cause: str, answer: Response | None = None):
        super().__init__(cause)
        self.answer = answer


class Exchange:
    """One request in progress: where its answer goes, and how much of it was sent."""

    def __init__(self, scope, send, metrics: Metrics):
        self.scope = scope
        self._send, self._metrics = send, metrics
        self._began = time.perf_counter()
        self.model = UNKNOWN
        self.status = 0  # of the answer; 0: nothing was sent
        self.complete = False  # all of the answer was sent: a caller who leaves now has it

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self._began

    async def send(self, message: dict) -> None:
        """Sends a message of the answer (ASGI)."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._metrics.first_byte.labels(self.model).observe(self.seconds)
        else:
            self.complete = not message.get("more_body", False)
        await self._send(message)

    async def part(self, body: bytes, last: bool = False) -> None:
        """Sends a part of a stream."""
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})

    async def refuse(self, error: ApiError) -> None:
        """Answers with an error; the reader of a stream gets it as an event, as from vLLM itself."""
        self._metrics.errors.labels(error.kind).inc()
        if self.status:
            await self.part(b"data: " + json.dumps(error.body()).encode() + b"\n\n", last=True)
        else:
            await error(self.scope, None, self.send)


class Forwarder:
    """The application behind every ``POST /v1/…``. ``session`` is set before it is called.

    Args:
        max_in_flight: Requests in progress (whose bodies are complete) beyond which new ones are refused with 429.
        timeout_s: Until an answer begins, and between its parts; until a body has arrived, if that is shorter.
    """

    session: aiohttp.ClientSession

    def __init__(self, replicas: Replicas, metrics: Metrics, max_in_flight: int, max_body_bytes: int, timeout_s: float):
        self._replicas, self._metrics = replicas, metrics
        self._limit, self._timeout_s = max_in_flight, timeout_s
        self._bodies = Bodies(max_body_bytes, timeout_s=min(BODY_S, timeout_s))
        self._in_flight = 0

    async def __call__(self, scope, receive, send) -> None:
        exchange = Exchange(scope, send, self._metrics)
        try:
            async with self._bodies.read(scope, receive) as body, self._place():
                exchange.model = self._model(body)
                headers = {
                    name.decode("latin-1"): value.decode("latin-1")
                    for name, value in scope["headers"]
                    if name in _REQUEST_HEADERS
                }
                headers.setdefault("content-type", "application/json")
                work = self._serve(exchange, headers, body)
                await until_caller_leaves(receive, work, lambda: exchange.complete)
        except ApiError as error:
            await exchange.refuse(error)
        except asyncio.CancelledError:  # the server is ending, and the time for requests in progress is over
            message = "the gateway is shutting down; try again when it is back"
            await exchange.refuse(ApiError(message, 503, kind="shutting_down", retry_after_s=1))
        finally:
            self._metrics.requests.labels(exchange.model, exchange.status).inc()
            self._metrics.seconds.labels(exchange.model).observe(exchange.seconds)

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """One of the places for requests in progress. Raises ApiError (429) when all are taken."""
        if self._in_flight >= self._limit:
            raise ApiError(
                f"{self._limit} requests are in progress; try again later",
                429, code="rate_limit_exceeded", kind="too_many_requests", retry_after_s=1,
            )  # fmt: skip
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._in_flight += change
        self._metrics.in_flight.set(self._in_flight)

    def _model(self, body: bytes) -> str:
        """The served model that a request names. Raises ApiError."""
        try:
            request = loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        if not isinstance(request, dict):
            raise ApiError("the body must be a JSON object")
        model, served = request.get("model"), ", ".join(self._replicas.of_model)
        if not isinstance(model, str):
            raise ApiError(f"model must be a string, one of {served}", param="model")
        if model not in self._replicas.of_model:
            message = f"model {model[:200]!r} is not served here; served: {served}"
            raise ApiError(message, 404, param="model", code="model_not_found", kind="model_not_found")
        return model

    async def _serve(self, exchange: Exchange, headers: dict, body: bytes) -> None:
        """Asks one replica, and after its failure another one."""
        model, failure = exchange.model, None
        tried: list[Replica] = []
        while len(tried) < _TRIES and (replica := self._replicas.pick(model, tried)):
            if tried:
                self._metrics.retries.labels(model).inc()
            tried.append(replica)
            try:
                answer = await self._ask(exchange, replica, headers, body)
            except ReplicaFailed as error:
                failure = error
                self._metrics.errors.labels("replica_error" if error.answer else "replica_failed").inc()
                replica.failed(str(error))
                if exchange.status:
                    message = "the answer broke off: its server failed"
                    raise ApiError(message, 502, code="bad_gateway", kind="broken_stream") from error
                continue
            replica.succeeded()
            return await (answer(exchange.scope, None, exchange.send) if answer else exchange.part(b"", last=True))
        if failure is None:
            message = f"no replica of {model!r} is up; see /health"
            raise ApiError(message, 503, code="no_replica", kind="no_replica", retry_after_s=1)
        if failure.answer:
            return await failure.answer(exchange.scope, None, exchange.send)
        message = f"no replica of {model!r} gave an answer; the gateway's log says why"
        raise ApiError(message, 502, code="bad_gateway", kind="bad_gateway", retry_after_s=1)

    async def _ask(self, exchange: Exchange, replica: Replica, headers: dict, body: bytes) -> Response | None:
        """One try: the whole answer, or None for an event stream, which was passed on.

        Raises:
            ReplicaFailed: Through the replica's fault; another one may answer unless a stream has begun.
            ApiError: When the time is over.
        """
        try:
            async with (
                replica.request(self._timeout_s) as scope,
                self.session.post(replica.url + exchange.scope["path"], data=body, headers=headers) as response,
            ):
                if response.status != 200 or response.content_type != "text/event-stream":
                    return await _whole(response)
                part = await response.content.readany()  # until then, a failure costs only a second try
                if not part:
                    raise aiohttp.ClientPayloadError("an empty stream")
                headers = Headers(_headers(response)).raw
                await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
                while part:
                    await exchange.part(part)
                    scope.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
                    part = await response.content.readany()
                return None
        except TimeoutError as error:
            if replica.state == "down":
                raise ReplicaFailed(f"{replica.name} hangs") from error
            if isinstance(error, aiohttp.ServerTimeoutError):
                raise ReplicaFailed(f"{replica.name} accepts no connection") from error
            message = f"no answer within {self._timeout_s:g} s (VLLM_REQUEST_TIMEOUT)"
            raise ApiError(message, 504, code="timeout", kind="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaFailed(f"{replica.name}: {type(error).__name__}: {error}") from error


async def _whole(response: aiohttp.ClientResponse) -> Response:
    """The whole answer.

    Raises:
        ReplicaFailed: For a server error, with an answer in OpenAI's format.
        aiohttp.ClientError: For an answer that no engine gives.
    """
    body, headers = await response.read(), _headers(response)
    is_object = False
    with contextlib.suppress(ValueError, RecursionError):
        is_object = isinstance(loads(body), dict)
    if not is_object:
        if response.status < 400:
            raise aiohttp.ClientPayloadError(f"an answer that is not a JSON object: {body[:80]!r}")
        logger.warning("a server answered %d: %r", response.status, body[:200])  # may hold its addresses and paths
        error = ApiError(f"the server answered {response.status} without a reason", response.status)
        answer = JSONResponse(error.body(), response.status, headers | {"content-type": "application/json"})
    else:
        answer = Response(body, response.status, headers)
    if response.status in _FAILED:
        raise ReplicaFailed(f"answers {response.status}", answer)
    return answer


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: response.headers[name] for name in _ANSWER_HEADERS if name in response.headers}
