"""Which server gets a request: the working one with the fewest requests in progress.

A replica is *up*; *suspect* after a request to it has failed (others are preferred until its health was checked); or
*down* while its health is bad. Health is checked regularly, and at once after a failure. Consecutive failures keep a
replica suspect for longer each time: a server may report good health and yet answer nothing useful.
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
    """One server, as one worker of the gateway knows it."""

    def __init__(self, url: str, models: tuple[str, ...], metrics: Metrics):
        self.url, self.name = url, urlsplit(url).netloc
        self.state = "down"  # until its health was checked
        self.outstanding = 0  # requests in progress
        self.last_used = 0
        self.wake = asyncio.Event()  # asks for a health check
        self._models = models
        self._up = [metrics.replica_up.labels(model, self.name) for model in models]
        self._outstanding = [metrics.outstanding.labels(model, self.name) for model in models]
        self._failures = self._silent = 0
        self._suspect_until = 0.0
        self._scopes: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def request(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Counts a request in progress.

        Raises:
            TimeoutError: When the time is over, or when the replica went down because it is stuck.
        """
        scope = asyncio.timeout(timeout_s)
        self._scopes.add(scope)
        self._count(1)
        try:
            async with scope:
                yield scope
        finally:
            self._scopes.discard(scope)
            self._count(-1)

    def _count(self, change: int) -> None:
        self.outstanding += change
        for gauge in self._outstanding:
            gauge.set(self.outstanding)

    def succeeded(self) -> None:
        """A request was answered."""
        self._failures = 0

    def failed(self, cause: str) -> None:
        """A request failed through the replica's fault: no more requests until its health was checked."""
        self._failures += 1
        hold = min(_SUSPECT_S * 2**self._failures, _SUSPECT_MAX_S)
        self._suspect_until = asyncio.get_running_loop().time() + hold
        if self.state == "up":
            self._become("suspect", cause)
        self.wake.set()

    async def probe(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Checks the replica's health."""
        fault, silent = None, False
        try:
            async with asyncio.timeout(timeout_s), session.get(f"{self.url}/health") as response:
                if response.status != 200:
                    fault = f"health answers {response.status}"
        except TimeoutError:
            fault, silent = f"health is silent for {timeout_s:g} s", True
        except (aiohttp.ClientError, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
        now = asyncio.get_running_loop().time()
        self._silent = self._silent + 1 if silent else 0
        if fault is None:
            if now >= self._suspect_until:
                self._become("up", "healthy")
            elif self.state == "down":
                self._become("suspect", "healthy, after failures")
        elif not silent or self._silent >= _SILENT_PROBES:
            self._become("down", fault)
            if silent:  # it hangs: its requests end here, and another replica may answer them
                for scope in self._scopes:
                    if scope.when() is not None and not scope.expired():
                        scope.reschedule(now)

    def _become(self, state: str, cause: str) -> None:
        if state != self.state:
            logger.warning("replica %s of %s: %s -> %s (%s)", self.name, self._models[0], self.state, state, cause)
            self.state = state
            for gauge in self._up:
                gauge.set(state == "up")


class Replicas:
    """All replicas of all models, and the tasks that check their health.

    Args:
        models: URLs of each served name. Names with the same URL share a replica.
        interval_s: Time between two checks.
        timeout_s: For a check.
    """

    def __init__(self, models: Mapping[str, list[str]], metrics: Metrics, interval_s: float, timeout_s: float):
        names: dict[str, list[str]] = {}
        for model, urls in models.items():
            for url in urls:
                names.setdefault(url, []).append(model)
        replicas = {url: Replica(url, tuple(served), metrics) for url, served in names.items()}
        self.of_model = {model: [replicas[url] for url in urls] for model, urls in models.items()}
        self._all = list(replicas.values())
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._uses = 0

    def pick(self, model: str, tried: Collection[Replica] = ()) -> Replica | None:
        """The replica with the fewest requests in progress, of those up, else of those suspect; equals alternate."""
        others = [replica for replica in self.of_model[model] if replica not in tried]
        for state in ("up", "suspect"):
            candidates = [replica for replica in others if replica.state == state]
            if candidates:
                chosen = min(candidates, key=lambda replica: (replica.outstanding, replica.last_used))
                self._uses += 1
                chosen.last_used = self._uses
                return chosen
        return None

    def serving(self) -> dict[str, int]:
        """Number of replicas of each model that may be asked."""
        return {name: sum(replica.state != "down" for replica in found) for name, found in self.of_model.items()}

    @contextlib.asynccontextmanager
    async def probed(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Health is checked once on entry, and then in the background."""

        async def watch(replica: Replica) -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(replica.wake.wait(), self._interval_s)
                replica.wake.clear()
                await replica.probe(session, self._timeout_s)

        await asyncio.gather(*(replica.probe(session, self._timeout_s) for replica in self._all))
        tasks = [asyncio.create_task(watch(replica)) for replica in self._all]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
