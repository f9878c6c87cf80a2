"""A chat request passed on to a replica and its answer passed back, as plain ASGI.

A whole answer is collected before it is sent on, so that a replica that dies in the middle costs nothing but a second
try elsewhere; an event stream is sent on part by part as it comes. The body is passed on as it was read: it is parsed
once, for ``model``.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

import aiohttp
import orjson

from vllm_server.gateway.errors import ApiError
from vllm_server.gateway.guard import read_body
from vllm_server.gateway.metrics import UNKNOWN, Metrics
from vllm_server.gateway.replicas import Replica, Replicas
from vllm_server.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)

_PASSED_ON = {b"authorization", b"content-type", b"x-request-id", b"traceparent", b"tracestate"}
_PASSED_BACK = ("content-type", "retry-after", "x-request-id")
_FAILED = (500, 502, 503, 504)
_TRIES = 2
_MAX_ANSWER = 64 << 20


class ReplicaFailed(Exception):
    """No answer of use came, through the replica's fault, and nothing was sent on."""


@dataclass(frozen=True)
class Answer:
    """A whole answer of a replica."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass
class Exchange:
    """One request under way: where its answer goes, and what of it has gone."""

    send: object
    started: float
    model: str = UNKNOWN
    status: int = 0  # of the answer that was begun; 0: nothing was sent on
    answered: bool = False  # its last part is given to the server: a caller who is gone now has it


class ChatForwarder:
    """The ASGI application behind /v1/chat/completions."""

    def __init__(
        self, settings: GatewaySettings, replicas: Replicas, session: aiohttp.ClientSession, metrics: Metrics
    ):
        self._settings, self._replicas, self._session, self._metrics = settings, replicas, session, metrics
        self._limit = settings.concurrent_per_worker
        self._in_flight = 0

    async def __call__(self, scope, receive, send) -> None:
        exchange = Exchange(send, time.perf_counter())
        self._in_flight += 1
        self._metrics.in_flight(self._in_flight)
        try:
            if self._in_flight > self._limit:
                message = f"{self._limit} requests are in hand already; ask again later"
                raise ApiError(message, 429, "too_many_requests", code="rate_limit_exceeded", retry_after_s=1)
            limit, timeout_s = self._settings.max_body_bytes, self._settings.request_timeout_s
            body = await read_body(scope, receive, limit, timeout_s)
            exchange.model = self._model(body)
            await self._until_caller_leaves(exchange, receive, self._serve(exchange, scope, body))
        except ApiError as error:
            await self._refuse(exchange, error)
        except asyncio.CancelledError:  # the server ends, and the time for requests in hand is over
            message = "the gateway is ending; ask again when it is back"
            await self._refuse(exchange, ApiError(message, 503, "shutting_down", retry_after_s=1))
        finally:
            self._in_flight -= 1
            self._metrics.in_flight(self._in_flight)
            self._metrics.answered(exchange.model, exchange.status, time.perf_counter() - exchange.started)

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        self._metrics.error(error.kind)
        if not exchange.status:
            exchange.status = error.status
            await error.send(exchange.send)
        else:  # of a stream: its reader learns it from an event, as from vLLM itself
            await _send_part(exchange.send, b"data: " + error.body() + b"\n\n", last=True)

    def _model(self, body: bytes) -> str:
        """The served model that is asked for. Raises ApiError."""
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError(f"the body is not JSON: {error}", 400, "bad_request") from error
        if not isinstance(request, dict):
            raise ApiError("the body must be a JSON object", 400, "bad_request")
        model = request.get("model")
        if not isinstance(model, str):
            raise ApiError(f"model must be a text, one of {self._served()}", 400, "bad_request", param="model")
        if model not in self._replicas.of_model:
            message = f"model {model!r} is not served here; served: {self._served()}"
            raise ApiError(message, 404, "model_not_found", code="model_not_found", param="model")
        return model

    def _served(self) -> str:
        return ", ".join(self._replicas.of_model)

    async def _until_caller_leaves(self, exchange: Exchange, receive, serving) -> None:
        """Run ``serving``; end it when the caller leaves, so that no engine works for nobody."""
        task = asyncio.current_task()
        left = False

        def leave(watcher: asyncio.Task) -> None:
            nonlocal left
            if not watcher.cancelled() and not exchange.answered:
                left = True
                task.cancel()

        watcher = asyncio.create_task(_disconnected(receive))
        watcher.add_done_callback(leave)
        try:
            await serving
        except asyncio.CancelledError:
            if not left or task.uncancel() > 0:
                raise
            raise ApiError("the caller left", 499, "client_closed") from None
        finally:
            exchange.answered = True
            watcher.cancel()

    async def _serve(self, exchange: Exchange, scope, body: bytes) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _PASSED_ON
        }
        headers.setdefault("content-type", "application/json")
        tried: list[Replica] = []
        failure: Answer | ReplicaFailed | None = None
        while len(tried) < _TRIES and (replica := self._replicas.pick(exchange.model, tried)):
            if tried:
                self._metrics.retried(exchange.model)
            tried.append(replica)
            try:
                answer = await self._ask(exchange, replica, headers, body)
            except ReplicaFailed as error:
                self._failed(replica, str(error), "replica_failed")
                failure = error
                continue
            if answer is None:  # streamed
                return
            if answer.status not in _FAILED:
                replica.worked()
                return await self._give(exchange, answer)
            self._failed(replica, f"answers {answer.status}", "replica_error")
            failure = answer
        if isinstance(failure, Answer):
            return await self._give(exchange, failure)
        if failure is not None:
            message = f"no replica of {exchange.model!r} gave an answer: {failure}"
            raise ApiError(message, 502, "bad_gateway", code="bad_gateway", retry_after_s=1)
        message = f"no replica of {exchange.model!r} is up; see /health"
        raise ApiError(message, 503, "no_replica", code="no_replica", retry_after_s=1)

    def _failed(self, replica: Replica, cause: str, kind: str) -> None:
        self._metrics.error(kind)
        replica.failed(cause)

    async def _ask(self, exchange: Exchange, replica: Replica, headers: dict, body: bytes) -> Answer | None:
        """One try: a whole answer; None when it was streamed. Raises ReplicaFailed, and ApiError when time is over."""
        timeout_s = self._settings.request_timeout_s
        try:
            async with (
                replica.serving(timeout_s) as scope,
                self._session.post(replica.chat_url, data=body, headers=headers) as response,
            ):
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await self._stream(exchange, replica, response, scope)
                return await _whole(response)
        except TimeoutError as error:
            if replica.state == "down":
                cause = f"{replica.name} hangs"
            elif isinstance(error, aiohttp.ServerTimeoutError):
                cause = f"{replica.name} accepts no connection"
            else:
                message = f"{replica.name} did not answer within {timeout_s:g} s (VLLM_REQUEST_TIMEOUT)"
                raise ApiError(message, 504, "timeout", code="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{replica.name}: {type(error).__name__}: {error}"
        if exchange.status:
            self._failed(replica, cause, "replica_failed")
            raise ApiError(f"the answer broke off: {cause}", 502, "broken_stream", code="bad_gateway")
        raise ReplicaFailed(cause)

    async def _stream(self, exchange: Exchange, replica: Replica, response, scope: asyncio.Timeout) -> None:
        loop, timeout_s = asyncio.get_running_loop(), self._settings.request_timeout_s
        part = await response.content.readany()  # before that, a failure can still be made good elsewhere
        if not part:
            raise aiohttp.ClientPayloadError("an empty stream")
        await self._begin(exchange, 200, _headers(response))
        while part:
            await _send_part(exchange.send, part)
            scope.reschedule(loop.time() + timeout_s)
            part = await response.content.readany()
        replica.worked()
        exchange.answered = True
        await _send_part(exchange.send, b"", last=True)

    async def _give(self, exchange: Exchange, answer: Answer) -> None:
        headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
        await self._begin(exchange, answer.status, headers)
        exchange.answered = True
        await _send_part(exchange.send, answer.body, last=True)

    async def _begin(self, exchange: Exchange, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        exchange.status = status
        self._metrics.first_byte(exchange.model, time.perf_counter() - exchange.started)
        await exchange.send({"type": "http.response.start", "status": status, "headers": headers})


async def _whole(response: aiohttp.ClientResponse) -> Answer:
    """The whole answer; one that is not what an engine says becomes an error. Raises aiohttp.ClientError."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER:
            raise aiohttp.ClientPayloadError(f"an answer of more than {_MAX_ANSWER} bytes")
    body = b"".join(parts)
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(orjson.loads(body), dict):
            return Answer(response.status, _headers(response), body)
    if response.status < 400:
        raise aiohttp.ClientPayloadError(f"an answer that is not a JSON object: {body[:80]!r}")
    message = f"the server answered {response.status}: {body[:200].decode(errors='replace')}"
    error = ApiError(message, response.status, "replica_error")
    headers = [(name, value) for name, value in _headers(response) if name != b"content-type"]
    return Answer(response.status, [*headers, (b"content-type", b"application/json")], error.body())


def _headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    given = response.headers
    return [(name.encode(), given[name].encode("latin-1", "replace")) for name in _PASSED_BACK if name in given]


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_part(send, part: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": not last})
