"""Which server gets a request: the one with the fewest in hand among those that work.

A replica is *up*; *suspect* after a request to it has failed (others are preferred until its health was asked); or
*down* while its health is bad. Health is asked at once after a failure, and regularly. Failures that follow each other
keep it suspect for longer each time, since a server may be healthy in its own eyes and yet answer nothing of use.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from urllib.parse import urlsplit

import aiohttp

from vllm_server.gateway.metrics import Metrics

logger = logging.getLogger(__name__)

_SILENT_PROBES = 3  # a busy server may answer late; one that is silent this often is stuck
_SUSPECT_S, _SUSPECT_MAX_S = 0.1, 10.0


class Replica:
    """One server: ``state`` (up, suspect, down) and how many requests it has in hand (from this worker)."""

    def __init__(self, url: str, models: tuple[str, ...], metrics: Metrics):
        self.url, self.models = url, models
        self.chat_url = f"{url}/v1/chat/completions"
        self.name = urlsplit(url).netloc
        self.outstanding = 0
        self.last_used = 0
        self.state = "down"  # until its health was asked
        self.wake = asyncio.Event()
        self._metrics = metrics
        self._failures = 0
        self._suspect_until = 0.0
        self._scopes: set[asyncio.Timeout] = set()
        self._silent = 0
        metrics.replica_state(models, self.name, False)

    @contextlib.asynccontextmanager
    async def serving(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Counts a request in hand. TimeoutError when time is over, or when the replica went down for silence."""
        scope = asyncio.timeout(timeout_s)
        self.outstanding += 1
        self._scopes.add(scope)
        self._metrics.outstanding(self.models, self.name, self.outstanding)
        try:
            async with scope:
                yield scope
        finally:
            self._scopes.discard(scope)
            self.outstanding -= 1
            self._metrics.outstanding(self.models, self.name, self.outstanding)

    def worked(self) -> None:
        """An answer of use came."""
        self._failures = 0

    def failed(self, cause: str) -> None:
        """A request failed through the replica's fault: out at once, health asked at once."""
        self._failures += 1
        hold = min(_SUSPECT_S * 2**self._failures, _SUSPECT_MAX_S)
        self._suspect_until = asyncio.get_running_loop().time() + hold
        if self.state == "up":
            self._become("suspect", cause)
        self.wake.set()

    def health(self, fault: str | None, silent: bool = False) -> None:
        """What a probe found: ``fault`` None is healthy; ``silent``: no answer in time."""
        self._silent = self._silent + 1 if silent else 0
        if fault is None:
            if asyncio.get_running_loop().time() >= self._suspect_until:
                self._become("up", "healthy")
            elif self.state == "down":
                self._become("suspect", "healthy, after failures")
        elif not silent or self._silent >= _SILENT_PROBES:
            self._become("down", fault)
            if silent:
                self._abort()

    def _abort(self) -> None:
        """End the requests in hand: the server hangs, and another one may answer them."""
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if scope.when() is not None and not scope.expired():
                scope.reschedule(now)

    def _become(self, state: str, cause: str) -> None:
        if state != self.state:
            logger.warning("replica %s of %s: %s -> %s (%s)", self.name, self.models[0], self.state, state, cause)
            self.state = state
            self._metrics.replica_state(self.models, self.name, state == "up")


class Replicas:
    """All replicas of all models, and the tasks that ask for their health."""

    def __init__(self, models: Mapping[str, list[str]], metrics: Metrics, interval_s: float, timeout_s: float):
        names: dict[str, list[str]] = {}
        for model, urls in models.items():
            for url in urls:
                names.setdefault(url, []).append(model)
        replicas = {url: Replica(url, tuple(served), metrics) for url, served in names.items()}
        self.of_model = {model: [replicas[url] for url in urls] for model, urls in models.items()}
        self._all = list(replicas.values())
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._turn = 0

    def pick(self, model: str, tried: Collection[Replica] = ()) -> Replica | None:
        """The replica with the fewest requests in hand, of those up, else of those suspect; equals take turns."""
        others = [replica for replica in self.of_model[model] if replica not in tried]
        for state in ("up", "suspect"):
            candidates = [replica for replica in others if replica.state == state]
            if candidates:
                chosen = min(candidates, key=lambda replica: (replica.outstanding, replica.last_used))
                self._turn += 1
                chosen.last_used = self._turn
                return chosen
        return None

    def serving(self) -> dict[str, int]:
        """Model -> how many of its replicas can be asked."""
        return {
            model: sum(replica.state != "down" for replica in replicas) for model, replicas in self.of_model.items()
        }

    @contextlib.asynccontextmanager
    async def watched(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Health is asked once before, and from then on in the background."""
        await asyncio.gather(*[self._probe(session, replica) for replica in self._all])
        tasks = [asyncio.create_task(self._watch(session, replica)) for replica in self._all]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await replica.wake.wait()
            replica.wake.clear()
            await self._probe(session, replica)

    async def _probe(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), session.get(f"{replica.url}/health") as response:
                fault = None if response.status == 200 else f"health answers {response.status}"
            replica.health(fault)
        except TimeoutError:
            replica.health(f"health is silent for {self._timeout_s:g} s", silent=True)
        except (aiohttp.ClientError, OSError) as error:
            replica.health(f"{type(error).__name__}: {error}")
