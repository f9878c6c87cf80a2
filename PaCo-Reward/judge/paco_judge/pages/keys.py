"""Who may ask a server: holders of its key."""

import hashlib
import hmac
import re
from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OWN_HOST = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?")


def has_bearer(connection: HTTPConnection, key: str) -> bool:
    """Whether the request has ``Authorization: Bearer <key>``."""
    return _equal(connection.headers.get("authorization", ""), f"Bearer {key}")


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("latin-1", "replace"), expected.encode())


class KeyGuard:
    """ASGI middleware: paths except ``open_paths`` need ``Authorization: Bearer <key>``.

    The error is OpenAI's.
    """

    def __init__(self, app: ASGIApp, key: str, open_paths: Collection[str] = ("/health",)) -> None:
        self._app = app
        self._key = key
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if is_open or has_bearer(HTTPConnection(scope), self._key):
            return await self._app(scope, receive, send)
        error = {
            "message": "a valid API key is needed: Authorization: Bearer …",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
        await JSONResponse({"error": error}, 401)(scope, receive, send)


class PageGuard:
    """ASGI middleware of a page for a browser on this machine.

    The address with ``?key=…`` is opened once, and a cookie keeps the key. Programs may send
    ``Authorization: Bearer <key>`` instead. Refused with status 403: requests with neither; a
    ``Host`` other than this machine's (a foreign site whose name was made to lead here); a request
    that a page of another origin sends.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key
        # A browser sends the cookies of all ports of a host to each of them.
        self._cookie = f"paco_{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        connection = HTTPConnection(scope)
        problem = self._problem(connection)
        if problem:
            return await JSONResponse({"error": problem}, 403)(scope, receive, send)

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{self._cookie}={self._key}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"].append((b"set-cookie", cookie.encode()))
            await send(message)

        opens = scope["method"] == "GET" and "key" in connection.query_params
        await self._app(scope, receive, send_with_cookie if opens else send)

    def _problem(self, connection: HTTPConnection) -> str | None:
        headers = connection.headers
        host = headers.get("host", "")
        if not _OWN_HOST.fullmatch(host):
            return "this page is served to this machine only: open it at 127.0.0.1"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return "another page may not send requests here"
        given = connection.cookies.get(self._cookie, "")
        if connection.scope["method"] == "GET":
            given = connection.query_params.get("key", given)
        if _equal(given, self._key) or has_bearer(connection, self._key):
            return None
        return "open the address that the command printed: it has the key of this page"
