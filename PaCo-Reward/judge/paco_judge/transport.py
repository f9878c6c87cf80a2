"""HTTP of all judge clients of a process: one event loop in a daemon thread, one session.

Rewards call from many threads at once. One loop serves them all with one pool of connections, and
costs each question less processor time than a thread of its own with a blocking client would.
"""

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
# Pauses before a request that the server failed on (HTTP 500) is repeated. They are long enough for
# a server that fails for some seconds, and few, because some requests fail always.
FAILURE_PAUSES_S = (1.0, 4.0)
SILENCE_S = 15.0  # for an answer of a server that has been silent for a whole deadline
_BUSY = (None, 429, 502, 503, 504)  # None: no connection
# Refused, or packets are dropped.
_NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# By URL, until the next answer: since when no connection was accepted, how long a request on an
# accepted one has waited at most, and when the last one gave up.
_down_since: dict[str, float] = {}
_waited_s: dict[str, float] = {}
_gave_up_at: dict[str, float] = {}
_answered_at: dict[str, float] = {}

# ``fork`` copies the memory, but no thread. While a process forks it holds the lock, so that the
# child does not inherit one that is held by a thread that it does not have.
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_executor = ThreadPoolExecutor(1)


class NoAnswer(Exception):
    """A request without a usable answer.

    ``status``: the server's HTTP status; None if it did not answer in time.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@cache
def _start(process: int) -> tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession]:
    """The loop and session of a process: a forked child has no thread of its parent."""

    async def open_session() -> aiohttp.ClientSession:
        # Nothing is unpacked: a megabyte of gzip would become a gigabyte.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"accept-encoding": "identity"},
            auto_decompress=False,
        )

    def close_session() -> None:
        if os.getpid() == process:
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(1)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="paco-judge", daemon=True).start()
    session = asyncio.run_coroutine_threadsafe(open_session(), loop).result()
    atexit.register(close_session)
    return loop, session


def run(coroutine: Coroutine) -> Any:
    """The result of a coroutine on the process's loop, from any other thread."""
    with _lock:
        loop, _ = _start(os.getpid())
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while not wait([future], 1.0).done:
        # Raises RuntimeError once the interpreter exits. Without it, a thread that waits for a
        # slow judge would keep an ended program alive.
        _executor.submit(int)
    return future.result()


def json_headers(api_key: str | None) -> dict[str, str]:
    """A request's headers, the key as a bearer token. Raises ValueError."""
    headers = {"content-type": "application/json"}
    if not api_key:
        return headers
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "the API key has a character that a header cannot hold, such as a line break"
        )
    return headers | {"authorization": f"Bearer {api_key}"}


async def post(url: str, headers: dict[str, str], body: bytes, deadline: float) -> bytes:
    """Post until there is an answer or a permanent error, or until the deadline. Raises NoAnswer.

    Repeats while there is no connection or the server is busy, and after the server failed as
    ``FAILURE_PAUSES_S`` say. A server that was silent for a whole deadline before is tried once and
    briefly, and requests that come meanwhile give up with that attempt.
    """
    start = time.monotonic()
    patience_s = deadline - start
    silence_s = max(_waited_s.get(url, 0.0), start - _down_since.get(url, start))
    is_silent = silence_s >= 0.9 * patience_s
    if patience_s <= 0:
        raise NoAnswer("the deadline passed before it was asked")
    if is_silent and start - _gave_up_at.get(url, -1.0) < 1.0:
        raise NoAnswer(f"the server has been silent for {silence_s:.0f} s")
    if is_silent:
        deadline = min(deadline, start + SILENCE_S)
    pause_s = 0.1
    failures = 0
    while True:
        try:
            return await request("POST", url, headers, deadline, body)
        except NoAnswer as error:
            now = time.monotonic()
            if error.status in _BUSY:
                wait_s = pause_s * random.uniform(0.5, 1.5)
                pause_s = min(2 * pause_s, 5.0)
            elif error.status >= 500 and failures < len(FAILURE_PAUSES_S):
                wait_s = FAILURE_PAUSES_S[failures] * random.uniform(0.8, 1.2)
                failures += 1
            else:
                raise
            down_s = now - _down_since.get(url, now)
            if down_s >= patience_s:
                raise NoAnswer(f"the server has been down for {down_s:.0f} s ({error})") from error
            if now + wait_s >= deadline:
                raise NoAnswer(f"gave up at the deadline; last: {error}") from error
        await asyncio.sleep(wait_s)


async def request(
    method: str, url: str, headers: dict[str, str], deadline: float, body: bytes | None = None
) -> bytes:
    """One attempt, on the process's loop. Raises NoAnswer."""
    _, session = _start(os.getpid())
    start = time.monotonic()
    answer = bytearray()
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
            _answered_at[url] = time.monotonic()
            for silence in (_down_since, _waited_s, _gave_up_at):
                silence.pop(url, None)
            async for part in response.content.iter_any():
                answer += part
                if len(answer) > LARGEST_ANSWER:
                    raise NoAnswer(
                        f"the answer is larger than {LARGEST_ANSWER} bytes", response.status
                    )
    except (aiohttp.ClientError, OSError) as error:
        now = time.monotonic()
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, _NO_CONNECTION):
            if method == "POST" and url not in _down_since:
                _down_since[url] = now
                logger.warning("nothing answers at %s (%s); retrying", url, error)
        elif type(error) is TimeoutError:  # at the deadline
            cause = f"no answer within {now - start:.0f} s"
            if _answered_at.get(url, 0.0) < start:
                _waited_s[url] = max(now - start, _waited_s.get(url, 0.0))
                _gave_up_at[url] = now
        raise NoAnswer(cause[:500]) from error
    if response.status != 200:
        text = answer.decode("utf-8", "replace")[:500]
        text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
        raise NoAnswer(f"HTTP {response.status}: {text}", response.status)
    return bytes(answer)
