"""A page as an application: its file, its state, its pictures and the answers to it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from paco_judge.errors import UserError
from paco_judge.pages.keys import PageGuard

_FOLDER = Path(__file__).parent
_NAME = re.compile(r"[^\W_][\w .-]{0,39}")
_HEADERS = {
    # Nothing from elsewhere, and the key in the address is told nobody.
    "content-security-policy": "default-src 'self' 'unsafe-inline'; img-src 'self' data:",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
# A picture that was loaded in advance is not loaded again.
_PICTURE_HEADERS = _HEADERS | {"cache-control": "private, max-age=3600"}


class Page(Protocol):
    """What a page answers. The methods are called one at a time, from the server's thread.

    A ``UserError`` that they raise is shown on the page.

    Attributes:
        html: The page's file.
    """

    html: Path

    def state(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What the page shows, for JSON. It is asked for again and again."""
        ...

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Keep an answer. It is on the disk when this returns the new state."""
        ...

    def undo(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take the last answer back; returns the new state."""
        ...

    def picture(self, name: str) -> Path | bytes | None:
        """A picture that is asked about now: a file, or PNG, JPEG or WebP; None: there is none.

        Args:
            name: An opaque name that the state gave, never a path.
        """
        ...


def person_name(text: object) -> str:
    """The name of a person, which may be a file's name. Raises UserError: It may not."""
    name = str(text or "").strip()
    if not _NAME.fullmatch(name):
        raise UserError(
            "a name has letters, digits, spaces, dots and dashes, at most 40, and begins with a "
            f"letter or a digit: {name[:60]!r}"
        )
    return name


def page_app(page: Page, key: str, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The application of a page.

    ``GET /`` is the page; ``GET /state``, ``POST /answer``, ``POST /undo`` and ``GET
    /picture/{name}`` are its methods. A ``UserError`` becomes status 422 and ``{"error": …}``.

    Args:
        page: The page.
        key: Needed by all routes, see ``PageGuard``.
        routes: Further ones, such as one for programs that send pictures.
    """
    html = page.html.read_text(encoding="utf-8")

    async def index(request: Request) -> Response:
        return HTMLResponse(html, headers=_HEADERS)

    async def shared(request: Request) -> Response:
        return FileResponse(_FOLDER / request.url.path.lstrip("/"), headers=_HEADERS)

    async def state(request: Request) -> Response:
        return JSONResponse(page.state(request.query_params), headers=_HEADERS)

    async def answer(request: Request) -> Response:
        return JSONResponse(page.answer(await _body(request)), headers=_HEADERS)

    async def undo(request: Request) -> Response:
        return JSONResponse(page.undo(await _body(request)), headers=_HEADERS)

    async def picture(request: Request) -> Response:
        found = page.picture(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        if isinstance(found, Path):
            return FileResponse(found, headers=_PICTURE_HEADERS)
        return Response(found, media_type=_media_type(found), headers=_PICTURE_HEADERS)

    async def show_error(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 422)

    own = [
        Route("/", index),
        Route("/page.css", shared),
        Route("/page.js", shared),
        Route("/state", state),
        Route("/answer", answer, methods=["POST"]),
        Route("/undo", undo, methods=["POST"]),
        Route("/picture/{name}", picture),
    ]
    app = Starlette(routes=[*own, *routes], exception_handlers={UserError: show_error})
    app.add_middleware(PageGuard, key=key)
    return app


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise HTTPException(400, "the body is not JSON") from error
    if not isinstance(body, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return body


def _media_type(encoded: bytes) -> str:
    if encoded.startswith(b"\x89PNG"):
        return "image/png"
    return "image/jpeg" if encoded.startswith(b"\xff\xd8") else "image/webp"
