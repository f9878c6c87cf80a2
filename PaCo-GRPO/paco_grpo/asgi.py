"""What gateway, transformers_server and reward service share: settings and OpenAI's errors.

FastAPI refuses an unknown route with status 404 and ``{"detail": …}``.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

# uvicorn.run's arguments in all three servers. Callers keep their connections between two batches
# of questions.
SERVER_SETTINGS: dict[str, Any] = {
    "ws": "none",
    "access_log": False,
    "proxy_headers": False,
    "server_header": False,
    "timeout_keep_alive": 75,
    "timeout_graceful_shutdown": 15,
}


class ApiError(Exception):
    """A request that is refused or has failed.

    ``param``: the field at fault; ``code``: OpenAI's, machine-readable.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def response(self) -> Response:
        """The error as OpenAI writes it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status)


async def _refuse(request: Request, error: ApiError) -> Response:
    return error.response()


EXCEPTION_HANDLERS = {ApiError: _refuse}
