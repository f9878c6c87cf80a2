"""HTTP for every judge client of a process: one event loop in a daemon thread, one aiohttp session."""

import asyncio
import logging
import math
import os
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor

import aiohttp
from yarl import URL

from paco_judge.json_io import parse

logger = logging.getLogger(__name__)

LARGEST_ANSWER = 1 << 20  # bytes; a judge's answer has a few thousand
FAILURES = 3  # attempts at a request that the server fails on (HTTP 500)
_BUSY = (429, 502, 503, 504)
_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_EXIT_POLL_S = 0.1


class Refused(Exception):
    """The server answered with an HTTP error; ``status`` is its code."""

    def __init__(self, status: int, reason: str, retry_after_s: float = 0.0):
        super().__init__(f"HTTP {status}: {reason}")
        self.status, self.retry_after_s = status, retry_after_s


class Unreachable(Exception):
    """The connection failed, or the deadline passed without an answer."""


def origin(url: str) -> str:
    """Scheme, host and port of a URL. Raises ValueError if it is not an http(s) URL."""
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    return str(parsed.origin())


def json_headers(api_key: str | None) -> dict[str, str]:
    """Headers of a JSON request, with the key as a bearer token. Raises ValueError: A header cannot hold the key."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "the API key has a line break or another character that a header cannot hold (often a newline at the end of "
            "the file that it was read from); correct it"
        )
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})


class Runtime:
    """The event loop in its thread, with the HTTP session."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._down_since: dict[str, float] = {}  # by origin
        self._ready = threading.Event()
        threading.Thread(target=self._run, name="paco-judge", daemon=True).start()
        self._ready.wait()

    def submit(self, coroutine: Coroutine) -> Future:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def get(self, url: str, headers: dict[str, str], timeout_s: float) -> bytes:
        """One attempt. Raises Refused or Unreachable."""
        return await self._attempt("GET", url, headers, None, self.loop.time() + timeout_s)

    async def post(
        self, url: str, headers: dict[str, str], body: bytes, deadline: float, patience_s: float = math.inf
    ) -> bytes:
        """Post until there is an answer, a permanent error, or the deadline.

        Retries a busy server (429, 502, 503, 504) and connection errors, with jittered, doubling pauses that honor
        Retry-After; other server errors ``FAILURES`` times in all.

        Args:
            deadline: Loop time in seconds.
            patience_s: A server that has been down this long, whichever request noticed it first, is tried once more
                and given up.

        Raises:
            Refused: A permanent error.
            Unreachable: No answer before the deadline, or the server has been down for ``patience_s``.
        """
        pause, failures = _FIRST_PAUSE_S, 0
        while True:
            wait = pause * random.uniform(0.5, 1.5)
            try:
                return await self._attempt("POST", url, headers, body, deadline)
            except Refused as error:
                failures += error.status not in _BUSY
                if error.status < 500 and error.status != 429 or failures == FAILURES:
                    raise
                last, wait = error, max(wait, error.retry_after_s)
            except Unreachable as error:
                last = error
                down_s = self.loop.time() - self._down_since.get(origin(url), math.inf)
                if down_s >= patience_s:
                    raise Unreachable(f"the server has been down for {down_s:.0f} s ({error})") from error
            if self.loop.time() + wait >= deadline:
                raise Unreachable(f"gave up at the deadline; last: {last}") from last
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _attempt(self, method: str, url: str, headers: dict, body: bytes | None, deadline: float) -> bytes:
        server = origin(url)
        try:
            async with (
                asyncio.timeout_at(deadline),
                self._session.request(method, url, headers=headers, data=body, allow_redirects=False) as response,
            ):
                if since := self._down_since.pop(server, None):
                    logger.warning("the judge at %s answers again, after %.0f s", server, self.loop.time() - since)
                answer = bytearray()
                async for part in response.content.iter_any():
                    answer += part
                    if len(answer) > LARGEST_ANSWER:
                        raise Refused(response.status, f"the answer is larger than {LARGEST_ANSWER} bytes")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if method == "POST" and server not in self._down_since:
                self._down_since[server] = self.loop.time()
                logger.warning(
                    "no judge answers at %s (%s); retrying. Restart it with `bash vllm_server/launch.sh` in PaCo-GRPO",
                    server, error,
                )  # fmt: skip
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise Unreachable("no answer before the deadline") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            raise Refused(response.status, _reason(bytes(answer)) or response.reason or "", _retry_after(response))
        return bytes(answer)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve_until_exit())

    async def _serve_until_exit(self) -> None:
        """Keep the session open until the interpreter starts to exit, then abandon all requests.

        Python ends idle executor threads at that moment, before it joins any other thread. Without this, a worker
        thread waiting for scores would keep the process alive until its deadline.
        """
        executor = ThreadPoolExecutor(1, "paco-judge-exit")
        idle = executor.submit(threading.current_thread).result()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        # Nothing is unpacked: a megabyte of gzip would become a gigabyte.
        plain = {"headers": {"accept-encoding": "identity"}, "auto_decompress": False}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, **plain) as self._session:
            self._ready.set()
            while idle.is_alive():
                await asyncio.sleep(_EXIT_POLL_S)


_lock = threading.Lock()
_runtimes: dict[int, Runtime] = {}  # by process: threads do not survive a fork


def runtime() -> Runtime:
    """The runtime of this process; started on first use."""
    with _lock:
        return _runtimes.get(os.getpid()) or _runtimes.setdefault(os.getpid(), Runtime())


def _reason(answer: bytes) -> str:
    """The server's own message (OpenAI's error format), else the start of the body; one printable line."""
    text = answer[:200].decode("utf-8", "replace")
    try:
        error = parse(answer)
        error = error.get("error", error)
        text = (error.get("message") if isinstance(error, dict) else error) or text
    except (ValueError, AttributeError):
        pass  # not JSON, or not an object
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:500]).strip()


def _retry_after(response: aiohttp.ClientResponse) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", 0.0)))
    except ValueError:
        return 0.0  # an HTTP date: our own pause is used
