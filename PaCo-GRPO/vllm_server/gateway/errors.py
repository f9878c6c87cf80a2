"""Refusals and failures as OpenAI's clients expect them."""

import orjson

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused or has failed.

    ``status``: of HTTP; ``kind``: label of the errors' counter; ``param``: the field at fault; ``retry_after_s``: when
    asking again may help.
    """

    def __init__(
        self,
        message: str,
        status: int,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """``{"error": {message, type, param, code}}``."""
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        return orjson.dumps(
            {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}},
        )

    async def send(self, send) -> None:
        """The whole answer, as ASGI messages."""
        body = self.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
