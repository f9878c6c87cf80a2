"""HTTP of all judge clients of a process: one event loop in a daemon thread, one session."""

import asyncio
import atexit
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

LARGEST_ANSWER = 1 << 20  # bytes; a judge's answer has a few thousand
CONNECT_TIMEOUT_S = 5.0
FAILURES = 3  # attempts at a request that the server fails on (HTTP 500)
_BUSY = (None, 429, 502, 503, 504)  # None: no connection
_NO_CONNECTION = (
    aiohttp.ClientConnectorError,
    aiohttp.ConnectionTimeoutError,
)  # refused, or packets are dropped
_down_since: dict[str, float] = {}  # by URL
_executor, _lock = ThreadPoolExecutor(1), threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class NoAnswer(Exception):
    """A request without a usable answer. ``status``: the server's HTTP status; None if it did not answer in time."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@cache
def _start(process: int) -> tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession]:
    """The loop and session of a process: a forked child has no thread of its parent."""

    async def session() -> aiohttp.ClientSession:
        # Nothing is unpacked: a megabyte of gzip would become a gigabyte.
        plain = {"headers": {"accept-encoding": "identity"}, "auto_decompress": False}
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), **plain)

    def close() -> None:
        if os.getpid() == process:
            asyncio.run_coroutine_threadsafe(opened.close(), loop).result(1)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="paco-judge", daemon=True).start()
    opened = asyncio.run_coroutine_threadsafe(session(), loop).result()
    atexit.register(close)
    return loop, opened


def run(coroutine: Coroutine) -> Any:
    """The result of a coroutine on the process's loop, from any other thread."""
    with _lock:
        loop, _ = _start(os.getpid())
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while not wait([future], 1.0).done:
        _executor.submit(
            int
        )  # an error once the interpreter exits: a waiting thread does not keep it alive
    return future.result()


def json_headers(api_key: str | None) -> dict[str, str]:
    """A request's headers, the key as a bearer token. Raises ValueError."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "the API key has a character that a header cannot hold, such as a line break"
        )
    return {"content-type": "application/json"} | (
        {"authorization": f"Bearer {api_key}"} if api_key else {}
    )


async def post(url: str, headers: dict[str, str], body: bytes, deadline: float) -> bytes:
    """Post until there is an answer, a permanent error, or the ``deadline`` (of ``time.monotonic``). Raises NoAnswer.

    Repeats while there is no connection or the server is busy, and other server errors up to ``FAILURES`` attempts. A
    server that has already been down for as long is tried once.
    """
    pause, failures, patience_s = 0.1, 0, deadline - time.monotonic()
    while True:
        try:
            return await request("POST", url, headers, deadline, body)
        except NoAnswer as error:
            failures += error.status not in _BUSY
            if error.status not in _BUSY and error.status < 500 or failures == FAILURES:
                raise
            now, wait_s = time.monotonic(), pause * random.uniform(0.5, 1.5)
            if now - _down_since.get(url, now) >= patience_s:
                raise NoAnswer(
                    f"the server has been down for {now - _down_since[url]:.0f} s ({error})"
                ) from error
            if now + wait_s >= deadline:
                raise NoAnswer(f"gave up at the deadline; last: {error}") from error
        await asyncio.sleep(wait_s)
        pause = min(2 * pause, 5.0)


async def request(
    method: str, url: str, headers: dict[str, str], deadline: float, body: bytes | None = None
) -> bytes:
    """One attempt, on the process's loop. Raises NoAnswer."""
    answer, session = bytearray(), _start(os.getpid())[1]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    asked = session.request(
        method, url, headers=headers, data=body, timeout=timeout, allow_redirects=False
    )
    try:
        async with asyncio.timeout_at(deadline), asked as response:
            _down_since.pop(url, None)
            async for part in response.content.iter_any():
                answer += part
                if len(answer) > LARGEST_ANSWER:
                    raise NoAnswer(
                        f"the answer is larger than {LARGEST_ANSWER} bytes", response.status
                    )
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, _NO_CONNECTION) and method == "POST" and url not in _down_since:
            _down_since[url] = time.monotonic()
            logger.warning("nothing answers at %s (%s); retrying", url, error)
        cause = (
            "no answer before the deadline"
            if type(error) is TimeoutError
            else f"{type(error).__name__}: {error}"
        )
        raise NoAnswer(cause[:500]) from error
    if response.status != 200:
        text = answer.decode("utf-8", "replace")[:500]
        text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
        raise NoAnswer(f"HTTP {response.status}: {text}", response.status)
    return bytes(answer)
