"""HTTP of all judge clients of a process: one event loop in a daemon thread, one session.

Rewards call from many threads at once. One loop serves them all with one pool of connections. A
thread for each request with a blocking client costs more processor time, and training asks
thousands of questions an epoch while it generates images.
"""

import asyncio
import atexit
import logging
import random
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
LONGEST_PAUSE_S = 5.0  # between two attempts
_start_lock = threading.Lock()
_exit_probe = ThreadPoolExecutor(1)


class NoAnswer(Exception):
    """A request without a usable answer.

    ``status``: the server's HTTP status; None if it did not answer in time.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@cache
def _start() -> tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession]:
    """The process's loop and session, made at the first call."""

    async def open_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="paco-judge", daemon=True).start()
    session = asyncio.run_coroutine_threadsafe(open_session(), loop).result()
    atexit.register(lambda: asyncio.run_coroutine_threadsafe(session.close(), loop).result(1))
    return loop, session


def run(coroutine: Coroutine) -> Any:
    """The result of a coroutine on the process's loop, from any other thread."""
    with _start_lock:
        loop, _ = _start()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while not wait([future], 1.0).done:
        # Executors refuse work once the interpreter exits (RuntimeError). Asking one every second
        # ends this thread then. Else a slow judge would keep an ended program alive.
        _exit_probe.submit(int)
    return future.result()


def url_of(host: str, port: int) -> str:
    """The address of a server; one of IPv6 stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def json_headers(api_key: str | int | None) -> dict[str, str]:
    """A request's headers, the key as a bearer token; YAML and JSON may make it a number."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {str(api_key).strip()}"
    return headers


@cache
def _warn_once(url: str, status: int | None) -> None:
    logger.warning("no answer from %s (%s); retrying", url, status or "no connection")


async def post(url: str, headers: dict[str, str], body: bytes, deadline: float) -> bytes:
    """Post until there is an answer or a permanent error, or until the deadline. Raises NoAnswer.

    Without a connection, and after 429 and 5xx, it is repeated with growing pauses. A request that
    the server fails on (500) gives up after six seconds, because some fail always.
    """
    start = time.monotonic()
    pause_s = 0.1
    failure: NoAnswer | None = None
    while True:
        try:
            answer = await request("POST", url, headers, deadline, body)
            if failure is not None:  # it is back, and its next outage is logged again
                _warn_once.cache_clear()
            return answer
        except NoAnswer as error:
            failure = error
        status = failure.status
        is_permanent = status is not None and status != 429 and status < 500
        if is_permanent or (status == 500 and pause_s >= LONGEST_PAUSE_S):
            raise failure
        wait_s = pause_s * random.uniform(0.5, 1.5)
        now = time.monotonic()
        if now + wait_s >= deadline:
            raise NoAnswer(f"gave up after {now - start:.0f} s without an answer; last: {failure}")
        _warn_once(url, status)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await asyncio.sleep(wait_s)


async def request(
    method: str, url: str, headers: dict[str, str], deadline: float, body: bytes | None = None
) -> bytes:
    """One attempt, on the process's loop. Raises NoAnswer."""
    _, session = _start()
    start = time.monotonic()
    exchange = session.request(
        method,
        url,
        headers=headers,
        data=body,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        allow_redirects=False,
    )
    try:
        async with asyncio.timeout_at(deadline), exchange as response:
            answer = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        cause = f"{type(error).__name__}: {error}"[:500]
        if type(error) is TimeoutError:
            cause = f"no answer within {time.monotonic() - start:.0f} s"
        raise NoAnswer(cause) from error
    if response.status != 200:
        text = answer.decode("utf-8", "replace")[:500]
        raise NoAnswer(f"HTTP {response.status}: {text}", response.status)
    return answer
