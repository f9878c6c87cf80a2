"""HTTP for every judge client of a process: one event loop thread, one aiohttp session, one score cache."""

import asyncio
import logging
import math
import os
import random
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import aiohttp
from yarl import URL

from paco_judge.outside import parse

logger = logging.getLogger(__name__)

CACHE_ENTRIES = 200_000
_CONNECT_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
_WARN_AGAIN_S = 60.0
_EXIT_POLL_S = 0.1


class Refused(Exception):
    """The server answered with an HTTP error; ``status`` is its code."""

    def __init__(self, status: int, reason: str, retry_after_s: float = 0.0):
        super().__init__(f"HTTP {status}: {reason}")
        self.status, self.retry_after_s = status, retry_after_s


class Unreachable(Exception):
    """The connection failed, or the deadline passed without an answer."""


class NoConnection(Unreachable):
    """Nothing accepts connections: the server has stopped, or was never started."""


@lru_cache(maxsize=64)
def origin(url: str) -> URL:
    """Scheme, host and port of a URL. Raises ValueError if it is not an http(s) URL."""
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    return parsed.origin()


def json_headers(api_key: str | None) -> dict[str, str]:
    """Headers of a JSON request, with the key as a bearer token. Raises ValueError: A header cannot hold the key."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "the API key has a line break or another character that a header cannot hold (often a newline at the end of "
            "the file that it was read from); correct it"
        )
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})


class Outages:
    """Servers that accept no connection at present. Logged at once, then once a minute, and at the end of the outage."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._since: dict[URL, float] = {}
        self._logged: dict[URL, float] = {}

    def failed(self, server: URL, error: Exception, patience_s: float, left_s: float) -> float:
        """Record a failed connection of a request with ``left_s`` to its deadline; returns the outage in seconds."""
        now = self._clock()
        gone = now - self._since.setdefault(server, now)
        if now - self._logged.get(server, -math.inf) >= _WARN_AGAIN_S:
            self._logged[server] = now
            logger.warning(
                "no judge answers at %s (%s), for %.0f s now; retrying for %.0f s more. Restart it with "
                "`bash vllm_server/launch.sh` in PaCo-GRPO",
                server, error, gone, max(0.0, min(patience_s - gone, left_s)),
            )  # fmt: skip
        return gone

    def answered(self, server: URL) -> None:
        """Record any answer, errors included."""
        since = self._since.pop(server, None)
        if since is not None and self._logged[server] >= since:
            logger.warning("the judge at %s answers again, after %.0f s", server, self._clock() - since)


class Cache:
    """The most recently used scores, at most ``entries``. Used on one thread."""

    def __init__(self, entries: int = CACHE_ENTRIES):
        self._entries = entries
        self._scores: OrderedDict[tuple, float] = OrderedDict()

    def get(self, key: tuple) -> float | None:
        """The score, which then counts as used; None if it is not known."""
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: tuple, score: float) -> None:
        """Add a score; the least recently used one may be dropped."""
        self._scores[key] = score
        if len(self._scores) > self._entries:
            self._scores.popitem(last=False)


class Runtime:
    """An event loop in a daemon thread, with an HTTP session and the cache."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.cache = Cache()
        self.in_flight: dict[tuple, asyncio.Future] = {}
        self._outages = Outages(self.loop.time)
        self._executor = ThreadPoolExecutor(1, "paco-judge-exit")
        self._idle = self._executor.submit(threading.current_thread).result()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paco-judge", daemon=True)
        self._thread.start()
        self._ready.wait()

    def alive(self) -> bool:
        """False in a forked child: threads do not survive a fork."""
        return self._thread.is_alive()

    def submit(self, coroutine: Coroutine) -> Future:
        """Run a coroutine on the loop. Raises RuntimeError on the loop's own thread, where waiting would block it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the judge client was called from its own event loop thread")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def get(self, url: str, headers: dict[str, str], timeout_s: float) -> bytes:
        """One attempt. Raises Refused or Unreachable."""
        return await self._attempt("GET", url, headers, None, self.loop.time() + timeout_s)

    async def post(
        self, url: str, headers: dict[str, str], body: bytes, deadline: float, patience_s: float = math.inf
    ) -> bytes:
        """Post until there is an answer, a permanent error, or the deadline.

        Retries 429, 5xx and connection errors, with jittered, doubling pauses; honors Retry-After.

        Args:
            deadline: Loop time in seconds.
            patience_s: A server that has been down this long, whichever request noticed it first, is tried once more
                and given up.

        Raises:
            Refused: A permanent error.
            Unreachable: No answer before the deadline, or the server has been down for ``patience_s``.
        """
        server, pause, attempts = origin(url), _FIRST_BACKOFF_S, 0
        while True:
            attempts += 1
            wait = pause * random.uniform(0.5, 1.5)
            try:
                answer = await self._attempt("POST", url, headers, body, deadline)
                self._outages.answered(server)
                return answer
            except Refused as error:
                self._outages.answered(server)
                if error.status != 429 and error.status < 500:
                    raise
                last, wait = error, max(wait, error.retry_after_s)
            except NoConnection as error:
                gone_s = self._outages.failed(server, error, patience_s, deadline - self.loop.time())
                if gone_s >= patience_s:
                    raise Unreachable(f"the server has been down for {gone_s:.0f} s ({error})") from error
                last = error
            except Unreachable as error:
                last = error
            if self.loop.time() + wait >= deadline:
                raise Unreachable(f"gave up after {attempts} attempts at the deadline; last: {last}") from last
            logger.debug("attempt %d failed (%s), again in %.1f s", attempts, last, wait)
            await asyncio.sleep(wait)
            pause = min(2 * pause, _MAX_BACKOFF_S)

    async def _attempt(self, method: str, url: str, headers: dict, body: bytes | None, deadline: float) -> bytes:
        try:
            async with (
                asyncio.timeout_at(deadline),
                self._session.request(method, url, headers=headers, data=body, allow_redirects=False) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            cause = getattr(error, "os_error", error)
            raise NoConnection(f"{type(cause).__name__}: {cause}") from error
        except TimeoutError as error:
            raise Unreachable("no answer before the deadline") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise Refused(response.status, _reason(answer) or response.reason or "", _retry_after(response))
        return answer

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve_until_exit())

    async def _serve_until_exit(self) -> None:
        """Keep the session open until the interpreter starts to exit, then abandon all requests.

        Python ends idle executor threads at that moment, before it joins any other thread. Without this, a worker
        thread waiting for scores would keep the process alive until its deadline.
        """
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        cookies = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=cookies) as self._session:
            self._ready.set()
            while self._idle.is_alive():
                await asyncio.sleep(_EXIT_POLL_S)


def _keepalive_socket(address: tuple) -> socket.socket:
    """A socket that notices within a minute that its peer vanished without closing the connection."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


_lock = threading.Lock()
# The last one is this process's. Those inherited through a fork are kept: finalizing them would close the parent's
# connections.
_runtimes: list[Runtime] = []


def runtime() -> Runtime:
    """The runtime of this process; started on first use (again after a fork)."""
    with _lock:
        if not _runtimes or not _runtimes[-1].alive():
            _runtimes.append(Runtime())
        return _runtimes[-1]


def _forget_lock() -> None:
    """A lock that another thread held during the fork would stay locked in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _reason(answer: bytes) -> str:
    """The server's own message (OpenAI's error format), else the start of the body."""
    try:
        error = parse(answer)
        error = error.get("error", error)
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return str(message)[:500]
    except (ValueError, AttributeError):
        pass  # not JSON, or not an object
    return answer[:200].decode("utf-8", "replace").strip()


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", 0.0)))
    except ValueError:
        return 0.0  # an HTTP date: our own pause is used
