"""One event loop thread, one connection pool and one cache for all judge clients of a process."""

import asyncio
import concurrent.futures.thread  # noqa: F401 (its exit hook has to be registered before ours)
import json
import logging
import math
import os
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

from paco_judge.connections import Answer, ConnectionFailed, NoConnection, Origin, Pool

logger = logging.getLogger(__name__)

CACHE_ENTRIES = 200_000
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 5.0
_SAY_AGAIN_S = 60.0


class Refused(Exception):
    """The server answered with an HTTP error; ``status`` is its code."""

    def __init__(self, status: int, reason: str, retry_after_s: float = 0.0):
        super().__init__(f"HTTP {status}: {reason}")
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        """Whether asking again later can help."""
        return self.status == 429 or self.status >= 500


class Unreachable(Exception):
    """The connection failed, or the deadline passed without an answer."""


class Outages:
    """Which servers answer no connection at present, and since when. Used on one thread.

    A server that is gone is said once, at its first refused connection, again every minute, and once more when it is
    back; a training run would otherwise stand still without a word until the batch's deadline.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._since: dict[Origin, float] = {}
        self._said: dict[Origin, float] = {}

    def failed(self, origin: Origin, error: Exception, patience_s: float, left_s: float) -> float:
        """Note a failed connection of a request that has ``left_s``; returns how long the server has been gone, in s."""
        now = self._clock()
        gone = now - self._since.setdefault(origin, now)
        if now - self._said.get(origin, -math.inf) >= _SAY_AGAIN_S:
            self._said[origin] = now
            logger.warning(
                "no judge answers at %s (%s), for %.0f s now; asking again for %.0f s more. Start it again with "
                "`bash vllm_server/launch.sh` in PaCo-GRPO",
                origin, error, gone, max(0.0, min(patience_s - gone, left_s)),
            )  # fmt: skip
        return gone

    def answered(self, origin: Origin) -> None:
        """Note that the server answers (whatever it says)."""
        since = self._since.pop(origin, None)
        if since is not None:
            del self._said[origin]
            logger.warning("the judge at %s answers again, after %.0f s", origin, self._clock() - since)


class Cache:
    """The most recently used scores, at most ``entries``. Used on one thread."""

    def __init__(self, entries: int = CACHE_ENTRIES):
        self._entries = entries
        self._scores: OrderedDict[tuple, float] = OrderedDict()

    def get(self, key: tuple) -> float | None:
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: tuple, score: float) -> None:
        self._scores[key] = score
        if len(self._scores) > self._entries:
            self._scores.popitem(last=False)

    def clear(self) -> None:
        self._scores.clear()

    def __len__(self) -> int:
        return len(self._scores)


class Runtime:
    """An event loop in a daemon thread, with a keep-alive connection pool and the cache."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.cache = Cache()
        self.under_way: dict[tuple, asyncio.Future] = {}
        self._pid = os.getpid()
        self._pool = Pool()
        self._outages = Outages(self.loop.time)
        self._thread = threading.Thread(target=self._run, name="paco-judge", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """False in a forked child: threads do not survive a fork."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """End the pool and the thread; requests under way are abandoned."""
        if self.alive():
            self.submit(self._shut_down())
            self._thread.join(timeout=5.0)

    async def get(self, url: str, headers: dict[str, str], timeout_s: float) -> bytes:
        """One attempt. Raises Refused or Unreachable."""
        return await self._attempt("GET", url, headers, b"", self.loop.time() + timeout_s)

    async def post(
        self, url: str, headers: dict[str, str], body: bytes, deadline: float, patience_s: float = math.inf
    ) -> bytes:
        """Ask until there is an answer, an error that asking again cannot help, or the deadline (loop time).

        Asks again after 429, 5xx and connection errors only, with jittered, doubling pauses; a server's Retry-After
        is respected. ``patience_s``: a server that has been gone this long, whichever request met it first, is tried
        once more and given up. Raises Refused or Unreachable.
        """
        origin, pause, attempts = Origin.of(url)[0], _FIRST_BACKOFF_S, 0
        while True:
            attempts += 1
            try:
                answer = await self._attempt("POST", url, headers, body, deadline)
                self._outages.answered(origin)
                return answer
            except (Refused, Unreachable) as error:
                self._note(origin, error, patience_s, deadline)
                wait = max(pause * random.uniform(0.5, 1.5), getattr(error, "retry_after_s", 0.0))
                if self.loop.time() + wait >= deadline:
                    raise Unreachable(f"gave up after {attempts} attempts at the deadline; last: {error}") from error
                logger.debug("attempt %d failed (%s), again in %.1f s", attempts, error, wait)
                await asyncio.sleep(wait)
                pause = min(2 * pause, _MAX_BACKOFF_S)

    def _note(self, origin: Origin, error: Refused | Unreachable, patience_s: float, deadline: float) -> None:
        """What a failed attempt says about the server. Raises it where asking again cannot help."""
        if isinstance(error, Refused):
            self._outages.answered(origin)
            if not error.passing:
                raise error
        elif isinstance(error.__cause__, NoConnection):
            gone_s = self._outages.failed(origin, error, patience_s, deadline - self.loop.time())
            if gone_s >= patience_s:
                raise Unreachable(f"the server has been gone for {gone_s:.0f} s ({error})") from error

    async def _attempt(self, method: str, url: str, headers: dict, body: bytes, deadline: float) -> bytes:
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._pool.ask(method, url, headers, body)
        except TimeoutError as error:
            raise Unreachable("no answer before the deadline") from error
        except ConnectionFailed as error:
            raise Unreachable(str(error)) from error
        if answer.status != 200:
            raise Refused(answer.status, _reason(answer), _retry_after(answer))
        return answer.body

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def _shut_down(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._pool.close()
        self.loop.stop()


_lock = threading.Lock()
_runtime: Runtime | None = None


def runtime() -> Runtime:
    """The runtime of this process; started on first use (again after a fork)."""
    global _runtime
    current = _runtime
    if current is not None and current.alive():
        return current
    with _lock:
        if _runtime is None or not _runtime.alive():
            _runtime = Runtime()
            _end_with_the_process(_runtime)
        return _runtime


def _end_with_the_process(runtime: Runtime) -> None:
    """Abandon what is under way when the interpreter ends.

    Before threads are joined, which is earlier than ``atexit``: a worker thread that waits for scores would keep the
    process alive until its deadline. The executors' own hook, registered before ours, runs after it.
    """
    threading._register_atexit(runtime.close)


def _forget_lock() -> None:
    """A lock that another thread held during the fork would stay locked in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _reason(answer: Answer) -> str:
    """The server's own message (OpenAI's error format, or the start of the body)."""
    try:
        error = json.loads(answer.body)
        error = error.get("error", error)
        message = error.get("message") if isinstance(error, dict) else error
        if message:
            return str(message)[:500]
    except (ValueError, AttributeError):
        pass  # not JSON, or not an object: the text is the best there is
    return answer.body[:200].decode("utf-8", "replace").strip() or answer.reason


def _retry_after(answer: Answer) -> float:
    try:
        return max(0.0, float(answer.headers.get("retry-after", 0.0)))
    except ValueError:
        return 0.0  # an HTTP date: our own pause is used
