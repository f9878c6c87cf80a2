"""What a gateway serves, where, and within which limits."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class GatewaySettings:
    """``models``: served name -> URLs of its replicas (an adapter has its base's). The API key is not part of it.

    ``max_concurrent`` and ``workers``: each worker process takes its share of the limit. ``request_timeout_s``: until
    an answer begins, and then between its parts. A replica's health is asked every ``probe_interval_s``.
    """

    models: dict[str, list[str]]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    max_concurrent: int = 1024
    max_body_bytes: int = 32 << 20
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    drain_s: float = 15.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0
    metrics_folder: str | None = None

    @property
    def concurrent_per_worker(self) -> int:
        return -(-self.max_concurrent // self.workers)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "GatewaySettings":
        return cls(**json.loads(text))


def read_upstreams(entries: Sequence[str]) -> dict[str, list[str]]:
    """``name=url`` entries; one name several times means replicas. Raises ValueError naming the entry."""
    models: dict[str, list[str]] = {}
    for entry in entries:
        name, equals, url = entry.rpartition("=")
        address = urlsplit(url)
        if not (name and equals and address.scheme == "http" and address.hostname and address.port):
            raise ValueError(f"--upstream must be NAME=http://HOST:PORT, got {entry!r}")
        urls = models.setdefault(name, [])
        if url.rstrip("/") in urls:
            raise ValueError(f"--upstream {entry!r} is given twice")
        urls.append(url.rstrip("/"))
    return models
