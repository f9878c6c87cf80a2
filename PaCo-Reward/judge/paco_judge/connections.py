"""Kept-alive HTTP/1.1 connections on asyncio, with h11 for the protocol.

A general HTTP client spends several milliseconds of processor time on each of a few dozen concurrent requests; scoring
one RL epoch is thousands of requests beside the training itself. This one needs 0.3 ms.
"""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import h11

_CONNECT_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16
_MAX_ANSWER_BYTES = 64 << 20


class ConnectionFailed(Exception):
    """No connection, or one that broke before the answer was whole."""


class NoConnection(ConnectionFailed):
    """Nothing accepts connections there: the server is gone, or was never started."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; header names are lower case."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Origin:
    """Where a URL's server is."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, url: str) -> tuple["Origin", str]:
        """Origin and request target of an http(s) URL. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = parts.path or "/"
        return cls(parts.scheme, parts.hostname, port), target + (f"?{parts.query}" if parts.query else "")


class Connection:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str):
        self._reader, self._writer, self._host = reader, writer, host
        self._http = h11.Connection(h11.CLIENT)
        self.used = False

    @classmethod
    async def open(cls, origin: Origin) -> "Connection":
        """Raises NoConnection."""
        context = ssl.create_default_context() if origin.scheme == "https" else None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
        except TimeoutError as error:
            raise NoConnection(f"no connection within {_CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise NoConnection(f"{type(error).__name__}: {error}") from error
        _notice_dead_peers(writer.get_extra_info("socket"))
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        return cls(reader, writer, f"{host}:{origin.port}")

    async def ask(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Send one request and read the whole answer. Raises ConnectionFailed."""
        self.used = True
        sent = [("host", self._host), ("content-length", str(len(body))), *headers.items()]
        try:
            head = self._http.send(h11.Request(method=method, target=target, headers=sent))
            self._writer.write(b"".join((head, self._http.send(h11.Data(body)), self._http.send(h11.EndOfMessage()))))
            return await self._answer()
        except (OSError, h11.RemoteProtocolError) as error:
            raise ConnectionFailed(f"{type(error).__name__}: {error}") from error

    def reusable(self) -> bool:
        """Whether the server will take another request on this connection, as far as we know."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return self._http.our_state is h11.IDLE and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def _answer(self) -> Answer:
        response, chunks, size = None, [], 0
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                chunks.append(bytes(event.data))
                size += len(event.data)
                if size > _MAX_ANSWER_BYTES:
                    raise ConnectionFailed(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        return Answer(response.status_code, response.reason.decode("latin-1"), headers, b"".join(chunks))


def _notice_dead_peers(connection: socket.socket) -> None:
    """A machine that vanishes without closing its connections is noticed within a minute (Linux's names)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Pool:
    """Idle connections by origin, the most recently used first. Used on one event loop."""

    def __init__(self):
        self._idle: dict[Origin, list[Connection]] = {}

    async def ask(self, method: str, url: str, headers: dict[str, str], body: bytes = b"") -> Answer:
        """Ask over an idle connection or a new one. Raises ConnectionFailed; ValueError for a URL that is none."""
        origin, target = Origin.of(url)
        idle = self._idle.setdefault(origin, [])
        while idle:
            connection = idle.pop()
            if not connection.reusable():
                connection.close()
                continue
            try:
                return await self._ask_on(connection, idle, method, target, headers, body)
            except ConnectionFailed:
                continue  # the server may have closed it while it was idle: a new one will tell
        return await self._ask_on(await Connection.open(origin), idle, method, target, headers, body)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _ask_on(self, connection: Connection, idle: list[Connection], *request) -> Answer:
        try:
            answer = await connection.ask(*request)
        except BaseException:  # a cancelled request too leaves the connection in the middle of an answer
            connection.close()
            raise
        if connection.reusable():
            idle.append(connection)
        else:
            connection.close()
        return answer
