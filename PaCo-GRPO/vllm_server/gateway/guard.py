"""Who may ask, and how much at once: the API key on every route but health, and the limit of a body."""

import asyncio
import hashlib
import hmac

from vllm_server.gateway.errors import ApiError

OPEN_PATH = "/health"  # containers and balancers ask it without a key


class KeyGuard:
    """ASGI middleware: every path but /health needs ``Authorization: Bearer <key>``, also those that do not exist."""

    def __init__(self, app, key: str, metrics):
        self._app, self._metrics = app, metrics
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN_PATH and not self._allowed(scope):
            error = ApiError(
                "a valid API key is needed: Authorization: Bearer …", 401, "unauthorized", code="invalid_api_key"
            )
            self._metrics.error(error.kind)
            await error.send(send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope) -> bool:
        given = header(scope, b"authorization") or b""
        scheme, _, key = given.partition(b" ")
        # Digests have one length: the time taken tells neither the key's length nor how much of it was right.
        same = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return same and scheme.lower() == b"bearer"


def header(scope, name: bytes) -> bytes | None:
    """The first value of a header (lower-case name); None where it is missing."""
    return next((value for given, value in scope["headers"] if given == name), None)


async def read_body(scope, receive, limit: int, timeout_s: float) -> bytes:
    """The request's body. Raises ApiError as soon as it is known to be too large, or when it does not come."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size, more = [], 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError("the caller left while sending", 499, "client_closed")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise ApiError(f"the body did not arrive within {timeout_s:g} s", 408, "body_timeout") from error
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes; send smaller images, or serve with a larger VLLM_MAX_BODY_MB"
    return ApiError(message, 413, "body_too_large", code="request_too_large")
