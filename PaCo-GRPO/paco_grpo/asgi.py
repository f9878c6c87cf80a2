"""What gateway, transformers engine and reward service share: errors in OpenAI's format, API key, bodies, limits.

uvicorn limits neither the time nor the size of a request's head with httptools (h11 limits the size, and is several
times slower), and its ``limit_concurrency`` counts idle connections: who opens enough of them would shut everybody
else out. Hence ``LimitedProtocol``.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10  # request line and headers
HEAD_S = 15.0  # for them to arrive
BODY_S = 120.0  # for a body
WRITE_S = 120.0  # for a caller to read what has been written
MAX_CONNECTIONS = 4096  # of a process
# Network addresses, absolute paths, addresses in memory.
_PRIVATE = re.compile(
    r"https?://[^\s'\"]+|\b(?:\d{1,3}(?:\.\d{1,3}){3}|localhost)(?::\d+)?\b|(?<![\w.])(?:/[\w.@+-]+){2,}/?|\b0x[0-9a-f]{6,}"
)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused or has failed, with its HTTP ``status``.

    Args:
        param: Field at fault.
        code: OpenAI's machine-readable code.
        kind: Label of the gateway's error counter.
        retry_after_s: Sent as ``Retry-After`` where asking again may help.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "bad_request",
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind, self.retry_after_s = kind, retry_after_s

    def body(self) -> dict:
        """The error as OpenAI writes it."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    async def __call__(self, scope, receive, send) -> None:
        """Answers a request with this error (an ASGI application)."""
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 431):
            headers["connection"] = "close"
        await JSONResponse(self.body(), self.status, headers)(scope, receive, send)


def unknown_route(known: str):
    """Handler of Starlette's own errors (unknown paths and methods); its message names the known routes."""

    async def answer(request: Request, error: HTTPException) -> Response:
        # Not request.url, which is built from the Host header, whatever that holds.
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}; known routes: {known}"
        return JSONResponse(ApiError(message, error.status_code).body(), error.status_code, error.headers)

    return answer


async def refuse(request: Request, error: ApiError) -> ApiError:
    """Starlette's handler of ApiError."""
    return error


def public(text: str) -> str:
    """An error's text without addresses and paths of this machine."""
    return _PRIVATE.sub("…", text)[:1000]


class KeyGuard:
    """ASGI middleware: every path except ``open_paths`` needs ``Authorization: Bearer <key>``, unknown paths too."""

    def __init__(self, app, key: str, on_refusal=lambda kind: None, open_paths: Collection[str] = ("/health",)):
        self._app, self._on_refusal, self._open_paths = app, on_refusal, open_paths
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._allowed(scope):
            return await self._app(scope, receive, send)
        self._on_refusal("unauthorized")
        message = "a valid API key is needed: Authorization: Bearer …"
        await ApiError(message, 401, code="invalid_api_key")(scope, receive, send)

    def _allowed(self, scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests have one length: timing reveals neither the key's length nor a correct prefix.
        same = hmac.compare_digest(hashlib.sha256(key.strip().encode("latin-1")).digest(), self._digest)
        return same and scheme.lower() == "bearer"


class Bodies:
    """Reads requests' bodies within limits, and counts the bytes of those in progress.

    When all together are too large, the oldest one that is still arriving is given up: slow callers keep nobody out.

    Args:
        each: Bytes of one body.
        total: Bytes of all together.
        timeout_s: For one to arrive.
    """

    def __init__(self, each: int, total: int | None = None, timeout_s: float = BODY_S):
        self.each, self.total, self.timeout_s = each, total or max(1 << 30, 4 * each), timeout_s
        self.held = 0
        self._arriving: dict[asyncio.Timeout, None] = {}  # the oldest first

    @contextlib.asynccontextmanager
    async def read(self, scope, receive) -> AsyncIterator[bytes]:
        """A request's body; its bytes count until the context ends.

        Raises:
            ApiError: As soon as the body is known to be too large, when it is late, or when the caller leaves.
        """
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > self.each:
            raise self._too_large()
        body = bytearray()
        try:
            await self._receive(receive, body)
            yield bytes(body)
        finally:
            self.held -= len(body)

    async def _receive(self, receive, body: bytearray) -> None:
        deadline, more = asyncio.timeout(self.timeout_s), True
        self._arriving[deadline] = None
        try:
            async with deadline:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        text = "the caller disconnected before the body was complete"
                        raise ApiError(text, 499, kind="client_closed")
                    part = message.get("body", b"")
                    body += part
                    self.held += len(part)
                    if len(body) > self.each:
                        raise self._too_large()
                    more = message.get("more_body", False)
                    if self.held > self.total:
                        self._make_room(deadline)
        except TimeoutError as error:
            if deadline not in self._arriving:
                raise self._no_room() from error
            text = f"the body did not arrive within {self.timeout_s:g} s"
            raise ApiError(text, 408, kind="body_timeout") from error
        finally:
            self._arriving.pop(deadline, None)

    def _make_room(self, own: asyncio.Timeout) -> None:
        oldest = next(iter(self._arriving))
        if oldest is own:
            raise self._no_room()
        del self._arriving[oldest]
        oldest.reschedule(0)  # now

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body is larger than {self.each} bytes; send fewer or smaller images at once (request_size), or raise "
            "the limit (VLLM_MAX_BODY_MB, --max-body-mb)",
            413, code="request_too_large", kind="body_too_large",
        )  # fmt: skip

    def _no_room(self) -> ApiError:
        message = f"the bodies in progress have {self.total} bytes together; try again later"
        return ApiError(message, 429, code="rate_limit_exceeded", kind="too_many_bytes", retry_after_s=1)


async def until_caller_leaves(receive, work: Awaitable, complete: Callable[[], bool] = lambda: False) -> Any:
    """The result of ``work``, which is cancelled when the caller disconnects before ``complete()``.

    Raises:
        ApiError: 499, for a caller who left.
    """
    task, left = asyncio.current_task(), False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        if not complete():
            left = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not left or task.uncancel() > 0:
            raise
        raise ApiError("the caller left", 499, kind="client_closed") from None
    finally:
        watcher.cancel()


def connection_limit() -> int:
    """Connections of a process: at most half of the files that it may have open, which a gateway needs twice."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(16, min(MAX_CONNECTIONS, files // 2 - 64))


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 on httptools, with limits on heads, framing, stalled readers and connections.

    Beyond the limit of connections, the one that has been waiting for its caller longest (idle, or in the middle of a
    head or body) is closed for a new one.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None  # until a head is complete
        self._stalled: asyncio.TimerHandle | None = None  # until the caller reads again
        self._framing = self._content = 0  # bytes of this request: head, chunk sizes and trailers; body
        self._since = self.loop.time()  # when it began to wait for its caller

    def connection_made(self, transport) -> None:
        """Starts the time for a head; makes room for this connection."""
        super().connection_made(transport)
        self._arm()
        if len(self.connections) > connection_limit():
            waiting = [other for other in self.connections if other is not self and other._waits_for_caller()]
            min(waiting, key=lambda other: other._since, default=self).transport.abort()

    def _waits_for_caller(self) -> bool:
        return self._between_requests() or self.cycle.more_body

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._disarm()
        self._unset_keepalive_if_required()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses what came, unless there is too much of it that is not a body."""
        self._framing += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._framing > HEAD_BYTES + self._content:
            self._refuse(431, f"the head of a request may have {HEAD_BYTES} bytes")
        elif self._timer is None and self._between_requests():
            self._arm()  # for the next head, or the rest of a body that is not wanted

    def on_headers_complete(self) -> None:
        """Starts the application; for a head that came at once and is too large, one that refuses."""
        self._disarm()
        app, self._since = self.app, self.loop.time()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            self.app = ApiError(f"the head of a request may have {HEAD_BYTES} bytes", 431, kind="head_too_large")
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body."""
        self._framing -= len(body)
        self._content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete: what comes now is the next one."""
        self._framing = self._content = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The connection is idle, or sends the rest of a body that is not wanted."""
        self._since = self.loop.time()
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._arm()

    def pause_writing(self) -> None:
        """The caller does not read: it has limited time."""
        super().pause_writing()
        self._stalled = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The caller reads again."""
        if self._stalled:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP: an error in the format of the others."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(message, status).body()).encode()
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


# uvicorn.run's arguments in all three servers.
SERVER_SETTINGS = {
    "http": LimitedProtocol,
    "ws": "none",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "backlog": 4096,
    "timeout_keep_alive": 75,  # callers keep their connections between two batches of questions
}
