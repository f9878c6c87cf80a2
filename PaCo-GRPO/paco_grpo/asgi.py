"""What gateway, CPU engine and reward service share: errors in OpenAI's format, the API key, the limit of a body."""

import hashlib
import hmac
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

# Network addresses, absolute paths, addresses in memory.
_PRIVATE = re.compile(
    r"https?://[^\s'\"]+|\b(?:\d{1,3}(?:\.\d{1,3}){3}|localhost)(?::\d+)?\b|(?<![\w.])(?:/[\w.@+-]+){2,}/?|\b0x[0-9a-f]{6,}"
)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

# uvicorn.run's arguments in all three servers. Callers keep their connections between two batches of questions.
SERVER_SETTINGS = {
    "ws": "none", "access_log": False, "proxy_headers": False, "server_header": False, "timeout_keep_alive": 75,
}  # fmt: skip


class ApiError(Exception):
    """A request that is refused or has failed, with its HTTP ``status``.

    Args:
        param: Field at fault.
        code: OpenAI's machine-readable code.
        retry_after_s: Sent as ``Retry-After`` where asking again may help.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def response(self) -> Response:
        """The error as OpenAI writes it."""
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status, headers)


async def refuse(request: Request, error: ApiError) -> Response:
    """Handler of ApiError."""
    return error.response()


def unknown_route(known: str):
    """Handler of Starlette's own errors (unknown paths and methods); its message names the known routes."""

    async def answer(request: Request, error: HTTPException) -> Response:
        # Not request.url, which is built from the Host header, whatever that holds.
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}; known routes: {known}"
        return ApiError(message, error.status_code).response()

    return answer


def public(text: str) -> str:
    """An error's text without addresses and paths of this machine."""
    return _PRIVATE.sub("…", text)[:1000]


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body. Raises ApiError as soon as it is known to have more than ``limit`` bytes."""
    declared, body = request.headers.get("content-length", ""), bytearray()
    too_large = ApiError(
        f"the body is larger than {limit} bytes; send fewer or smaller images at once (request_size), or raise the limit "
        "(VLLM_MAX_BODY_MB, --max-body-mb)",
        413, code="request_too_large",
    )  # fmt: skip
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large
    except ClientDisconnect as error:
        raise ApiError("the caller left before the body was complete", 499) from error
    return bytes(body)


class KeyGuard:
    """ASGI middleware: every path except ``open_paths`` needs ``Authorization: Bearer <key>``, unknown paths too."""

    def __init__(self, app, key: str, open_paths: Collection[str] = ("/health",)):
        self._app, self._open_paths = app, open_paths
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._allowed(scope):
            return await self._app(scope, receive, send)
        error = ApiError("a valid API key is needed: Authorization: Bearer …", 401, code="invalid_api_key")
        await error.response()(scope, receive, send)

    def _allowed(self, scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Digests have one length: timing reveals neither the key's length nor a correct prefix.
        same = hmac.compare_digest(hashlib.sha256(key.strip().encode("latin-1")).digest(), self._digest)
        return same and scheme.lower() == "bearer"
