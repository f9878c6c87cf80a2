"""A gateway and its fake servers as processes, for tests."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from serving_tools import ROOT, free_port, wait_for

UPSTREAM = Path(__file__).with_name("fake_upstream.py")
# Certificates are not read again for each request to the loopback.
LOCAL = httpx.Client(trust_env=False, verify=False, timeout=30)


class Upstream:
    """One fake server; it can be killed and started again on its port."""

    def __init__(self):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self) -> "Upstream":
        self.process = subprocess.Popen([sys.executable, "-S", str(UPSTREAM), str(self.port)])
        wait_for(lambda: health(self.url))
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def mode(self, name: str) -> None:
        LOCAL.get(f"{self.url}/mode/{name}").raise_for_status()

    def counts(self) -> dict:
        return LOCAL.get(f"{self.url}/counts").json()


class GatewayProcess:
    """The gateway in front of ``models`` (name -> servers), with options and a key."""

    def __init__(self, models: dict[str, list[Upstream]], *options: str, key: str | None = None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.chat_url = f"{self.url}/v1/chat/completions"
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        upstreams = [f"--upstream={name}={server.url}" for name, servers in models.items() for server in servers]
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
        environment |= {"PYTHONPATH": str(ROOT)} | ({"VLLM_API_KEY": key} if key else {})
        command = [sys.executable, "-m", "vllm_server.gateway_fastapi", "--port", str(self.port)]
        command += ["--probe-interval", "0.2", "--probe-timeout", "1", *options, *upstreams]
        self.process = subprocess.Popen(command, env=environment)
        try:
            wait_for(lambda: self.process.poll() is not None or health(self.url) == 200, 120)
        except AssertionError:
            self.stop()
            raise
        assert self.process.poll() is None

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def client(self, **options) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers=self.headers, trust_env=False, verify=False, timeout=60, **options
        )

    def ask(self, client: httpx.Client, model: str, **fields) -> httpx.Response:
        return client.post("/v1/chat/completions", json={"model": model, "messages": [{}], **fields})

    def ask_many(self, model: str, count: int, at_once: int) -> list[int]:
        """Status of each of ``count`` requests; 0 for a broken connection."""

        def one(number: int) -> int:
            try:
                response = self.ask(client, model, id=number)
            except httpx.TransportError:
                return 0
            if response.status_code == 200:
                assert response.json()["seen"]["id"] == number, "everybody gets the right answer"
            return response.status_code

        with self.client() as client, ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, range(count)))

    def curl(self, model: str = "Solo") -> subprocess.Popen:
        """A request in the background."""
        headers = [word for header in self.headers.items() for word in ("-H", ": ".join(header))]
        body = f'{{"model": "{model}"}}'
        return subprocess.Popen(["curl", "-si", *headers, "-d", body, self.chat_url], stdout=subprocess.PIPE)

    def metrics(self) -> dict[str, float]:
        """Sample -> value, as Prometheus would read them."""
        page = LOCAL.get(f"{self.url}/metrics", headers=self.headers).text
        lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def up(self, model: str) -> int:
        """How many replicas of a model are up."""
        found = self.metrics().items()
        return sum(value for name, value in found if name.startswith(f'paco_gateway_replica_up{{model="{model}"'))


def health(url: str) -> int:
    """Status of a server's health; 0 when nothing answers."""
    try:
        return LOCAL.get(f"{url}/health", timeout=5).status_code
    except httpx.TransportError:
        return 0
