"""HTTP of all judge clients of a process: one event loop in a daemon thread, one session.

Rewards call from many threads at once. One loop serves them all with one pool of connections. A
thread for each request with a blocking client would be less code, but costs more processor time:
1.1 to 2.4 ms a question with ``httpx.Client`` in 64 threads, 0.14 to 0.24 ms here (requests of 20
and 400 kB to a server on the same machine). Training asks thousands of questions an epoch while it
generates images.
"""

import asyncio
import atexit
import logging
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
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


@dataclass
class _Server:
    """How a URL has answered so far, so that calls give up early on one that is silent.

    Down: no connection is accepted. Waited: one is accepted, but no answer comes. After 90 % of a
    call's patience of either, later calls are brief until there is an answer.
    """

    answered_at: float = 0.0
    # Since the last answer:
    down_since: float | None = None  # since when no connection has been accepted
    waited_s: float = 0.0  # the longest wait of a request on an accepted connection
    gave_up_at: float | None = None  # when the last such wait ended

    def silence_s(self, now: float) -> float:
        """How long it has been silent, at least."""
        return max(self.waited_s, self.down_s(now))

    def down_s(self, now: float) -> float:
        """How long no connection has been accepted."""
        return 0.0 if self.down_since is None else now - self.down_since

    def has_answered(self, now: float) -> None:
        """Forget all silence."""
        self.answered_at = now
        self.down_since = None
        self.waited_s = 0.0
        self.gave_up_at = None

    def has_not_answered(self, start: float, now: float) -> None:
        """A request from ``start`` to ``now`` got no answer; another one may have got one."""
        if self.answered_at < start:
            self.waited_s = max(now - start, self.waited_s)
            self.gave_up_at = now


_servers: defaultdict[str, _Server] = defaultdict(_Server)

# A data loader may fork this process. ``fork`` copies the memory, but only the thread that calls
# it. A lock that another thread holds at that moment would stay locked in the child forever. So the
# forking thread takes the lock first, and parent and child release it.
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_exit_probe = ThreadPoolExecutor(1)


class NoAnswer(Exception):
    """A request without a usable answer.

    ``status``: the server's HTTP status; None if it did not answer in time.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@cache
def _start(process: int) -> tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession]:
    """The loop and session of a process, made at its first call.

    A forked child inherits this cache, but not the thread that runs the loop. It has another
    process number, so it makes a loop of its own.
    """

    async def open_session() -> aiohttp.ClientSession:
        # Nothing is unpacked: a megabyte of gzip would become a gigabyte.
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"accept-encoding": "identity"},
            auto_decompress=False,
        )

    def close_session() -> None:
        if os.getpid() == process:  # a forked child inherits this function, too
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
        # Executors refuse work once the interpreter exits (RuntimeError). Asking one every second
        # ends this thread then. Else a slow judge would keep an ended program alive.
        _exit_probe.submit(int)
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
    server = _servers[url]
    start = time.monotonic()
    patience_s = deadline - start
    if patience_s <= 0:
        raise NoAnswer("the deadline passed before it was asked")
    silence_s = server.silence_s(start)
    if silence_s >= 0.9 * patience_s:
        if server.gave_up_at is not None and start - server.gave_up_at < 1.0:
            raise NoAnswer(f"the server has been silent for {silence_s:.0f} s")
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
            down_s = server.down_s(now)
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
    server = _servers[url]
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
            server.has_answered(time.monotonic())
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
            if method == "POST" and server.down_since is None:
                server.down_since = now
                logger.warning("nothing answers at %s (%s); retrying", url, error)
        elif type(error) is TimeoutError:  # at the deadline
            cause = f"no answer within {now - start:.0f} s"
            server.has_not_answered(start, now)
        raise NoAnswer(cause[:500]) from error
    if response.status != 200:
        text = answer.decode("utf-8", "replace")[:500]
        text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
        raise NoAnswer(f"HTTP {response.status}: {text}", response.status)
    return bytes(answer)
