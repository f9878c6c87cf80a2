"""What the gateway and the transformers engine share: errors in OpenAI's format, the API key, and reading a body."""

import asyncio
import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

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
        await JSONResponse(self.body(), self.status, headers)(scope, receive, send)


def unknown_route(known: str):
    """Handler of Starlette's own errors (unknown paths and methods); its message names the known routes."""

    async def answer(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}; known routes: {known}"
        return JSONResponse(ApiError(message, error.status_code).body(), error.status_code, error.headers)

    return answer


class KeyGuard:
    """ASGI middleware: every path except ``/health`` needs ``Authorization: Bearer <key>``, unknown paths too."""

    def __init__(self, app, key: str, on_refusal=lambda kind: None):
        self._app, self._on_refusal = app, on_refusal
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._allowed(scope):
            return await self._app(scope, receive, send)
        self._on_refusal("unauthorized")
        message = "a valid API key is needed: Authorization: Bearer …"
        await ApiError(message, 401, code="invalid_api_key")(scope, receive, send)

    def _allowed(self, scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests have one length: timing reveals neither the key's length nor a correct prefix.
        same = hmac.compare_digest(hashlib.sha256(key.strip().encode("latin-1")).digest(), self._digest)
        return same and scheme.lower() == "bearer"


async def read_body(scope, receive, limit: int, timeout_s: float | None = None) -> bytes:
    """Reads a request's body of at most ``limit`` bytes.

    Raises:
        ApiError: As soon as the body is known to be too large, when it is late, or when the caller leaves.
    """
    too_large = ApiError(
        f"the body is larger than {limit} bytes; send smaller images, or raise VLLM_MAX_BODY_MB (--max-body-mb)",
        413, code="request_too_large", kind="body_too_large",
    )  # fmt: skip
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError("the caller disconnected before the body was complete", 499, kind="client_closed")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise ApiError(f"the body did not arrive within {timeout_s:g} s", 408, kind="body_timeout") from error
    return bytes(body)
