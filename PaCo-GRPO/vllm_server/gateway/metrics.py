"""What Prometheus is told. Right under several worker processes: each writes its own files, a scrape adds them up."""

import os
from pathlib import Path

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
UNKNOWN = "unknown"  # label of a request whose model is not served: names that callers invent are no labels


class Metrics:
    """Counters of one worker. ``folder``: where workers meet (prometheus_client's multiprocess mode); None: alone.

    prometheus_client chooses its mode when it is first imported, from PROMETHEUS_MULTIPROC_DIR; so it is imported here.
    """

    def __init__(self, folder: str | None):
        if folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._folder = folder
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self._requests = Counter(
            "paco_gateway_requests", "Answers by model and HTTP status", ("model", "status"), **own
        )
        self._latency = Histogram(
            "paco_gateway_request_seconds", "Time from request to the end of its answer", ("model",),
            buckets=_BUCKETS, **own,
        )  # fmt: skip
        self._first = Histogram(
            "paco_gateway_first_byte_seconds", "Time from request to the start of its answer", ("model",),
            buckets=_BUCKETS, **own,
        )  # fmt: skip
        self._in_flight = Gauge(
            "paco_gateway_in_flight", "Requests being worked on", multiprocess_mode="livesum", **own
        )
        self._errors = Counter("paco_gateway_errors", "Refusals and failures by kind", ("kind",), **own)
        self._retries = Counter("paco_gateway_retries", "Requests asked again of another replica", ("model",), **own)
        self._up = Gauge(
            "paco_gateway_replica_up", "1: gets requests, 0: out", ("model", "replica"),
            multiprocess_mode="livemin", **own,
        )  # fmt: skip
        self._outstanding = Gauge(
            "paco_gateway_replica_outstanding", "Requests that a replica is working on", ("model", "replica"),
            multiprocess_mode="livesum", **own,
        )  # fmt: skip

    def answered(self, model: str, status: int, seconds: float) -> None:
        self._requests.labels(model, status).inc()
        self._latency.labels(model).observe(seconds)

    def first_byte(self, model: str, seconds: float) -> None:
        self._first.labels(model).observe(seconds)

    def error(self, kind: str) -> None:
        self._errors.labels(kind).inc()

    def retried(self, model: str) -> None:
        self._retries.labels(model).inc()

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def replica_state(self, models: tuple[str, ...], replica: str, up: bool) -> None:
        for model in models:
            self._up.labels(model, replica).set(up)

    def outstanding(self, models: tuple[str, ...], replica: str, count: int) -> None:
        for model in models:
            self._outstanding.labels(model, replica).set(count)

    def page(self) -> tuple[bytes, str]:
        """The text for a scrape and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        if not self._folder:
            return generate_latest(self._registry), CONTENT_TYPE_LATEST
        _forget_ended_workers(self._folder)
        everybody = CollectorRegistry()
        MultiProcessCollector(everybody, path=self._folder)
        return generate_latest(everybody), CONTENT_TYPE_LATEST


def _forget_ended_workers(folder: str) -> None:
    """A worker that was killed can no longer take back its gauges."""
    from prometheus_client.multiprocess import mark_process_dead

    for pid in {path.stem.rpartition("_")[2] for path in Path(folder).glob("gauge_live*.db")}:
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(int(pid), folder)
