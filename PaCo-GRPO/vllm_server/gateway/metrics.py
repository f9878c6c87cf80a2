"""Prometheus metrics, correct with several worker processes: each writes its own files, a scrape adds them up."""

import os
from pathlib import Path

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
UNKNOWN = "unknown"  # label of a request whose model is not served: names invented by callers are no labels


class Metrics:
    """Metrics of one worker.

    prometheus_client chooses its mode on first import from PROMETHEUS_MULTIPROC_DIR, hence the imports in methods.

    Args:
        folder: Shared by the workers (prometheus_client's multiprocess mode); None: there is only one.
    """

    def __init__(self, folder: str | None):
        if folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._folder = folder
        self._registry = CollectorRegistry()

        def metric(kind: type, name: str, text: str, *labels: str, **options):
            return kind(f"paco_gateway_{name}", text, labels, registry=self._registry, **options)

        total, lowest = {"multiprocess_mode": "livesum"}, {"multiprocess_mode": "livemin"}
        self.requests = metric(Counter, "requests", "Answers by model and HTTP status", "model", "status")
        self.seconds = metric(
            Histogram, "request_seconds", "Time from request to the end of its answer", "model", buckets=_BUCKETS
        )
        self.first_byte = metric(
            Histogram, "first_byte_seconds", "Time from request to the start of its answer", "model", buckets=_BUCKETS
        )
        self.in_flight = metric(Gauge, "in_flight", "Requests in progress", **total)
        self.errors = metric(Counter, "errors", "Refusals and failures by kind", "kind")
        self.retries = metric(Counter, "retries", "Requests sent again to another replica", "model")
        self.replica_up = metric(Gauge, "replica_up", "1: gets requests, 0: out", "model", "replica", **lowest)
        self.outstanding = metric(
            Gauge, "replica_outstanding", "Requests in progress on a replica", "model", "replica", **total
        )

    def page(self) -> tuple[bytes, str]:
        """The text for a scrape and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

        registry = self._registry
        if self._folder:
            # A worker that was killed could not take back its gauges.
            for pid in {path.stem.rpartition("_")[2] for path in Path(self._folder).glob("gauge_live*.db")}:
                if not Path(f"/proc/{pid}").exists():
                    mark_process_dead(int(pid), self._folder)
            registry = CollectorRegistry()
            MultiProcessCollector(registry, path=self._folder)
        return generate_latest(registry), CONTENT_TYPE_LATEST
