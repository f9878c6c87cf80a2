"""A page's server: a thread of this process, on the loopback."""

import contextlib
import secrets
import socket
from collections.abc import Callable
from threading import Thread
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from paco_judge.errors import UserError

_HOST = "127.0.0.1"


class PageServer:
    """Serves a page until ``stop``; a context manager that stops it.

    The thread ends with this process. Another process that is forked has no page.

    Args:
        make_app: The application for a key, which is new each time.
        port: 0 chooses a free one.

    Attributes:
        port: The port.
        key: The key of the page; programs send it as ``Authorization: Bearer <key>``.

    Raises:
        UserError: The port is taken.
    """

    def __init__(self, make_app: Callable[[str], ASGIApp], port: int) -> None:
        self.key = secrets.token_urlsafe(16)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((_HOST, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise UserError(
                f"port {port} cannot be used ({error}); choose another with --port"
            ) from error
        self._socket.listen()
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.key),
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        run = self._server.run
        self._thread = Thread(target=run, args=([self._socket],), name="page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address without its key."""
        return f"http://{_HOST}:{self.port}"

    def announcement(self) -> str:
        """Two lines for the terminal: the address with its key, and the way from elsewhere."""
        return (
            f"Open {self.url}/?key={self.key}\n"
            f"From another machine, first: ssh -L {self.port}:{_HOST}:{self.port} "
            f"{socket.gethostname()}"
        )

    def wait(self) -> None:
        """Return after Ctrl-C, or when ``stop`` was called elsewhere."""
        with contextlib.suppress(KeyboardInterrupt):
            while self._thread.is_alive():
                self._thread.join(1)

    def stop(self) -> None:
        """End the server. Requests that it works on have two seconds."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
