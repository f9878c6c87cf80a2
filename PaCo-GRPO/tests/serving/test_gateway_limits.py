"""What the gateway allows: keys, sizes, numbers of requests; several workers, and its end."""

import os
import signal
import socket
import subprocess
import threading

import httpx
import pytest
from gateway_tools import LOCAL, GatewayProcess, Upstream, health
from serving_tools import wait_for

KEY = "sk-test+/=42"


@pytest.fixture(scope="module")
def server():
    server = Upstream().start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def guarded(server):
    """Two workers, a key, 1 MB and 8 requests at once."""
    limits = ("--workers", "2", "--max-concurrent", "8", "--max-body-mb", "1")
    gateway = GatewayProcess({"Solo": [server]}, *limits, key=KEY)
    yield gateway
    gateway.stop()


@pytest.fixture(scope="module")
def open_gateway(server):
    gateway = GatewayProcess({"Solo": [server]})
    yield gateway
    gateway.stop()


@pytest.fixture(autouse=True)
def working(server):
    server.mode("ok")


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY,
     "Bearer schlüssel".encode()],
)  # fmt: skip
def test_without_the_key_every_route_except_health_is_closed(guarded, server, header):
    headers = {} if header is None else {"Authorization": header}
    paths = ("/v1/models", "/metrics", "/docs", "/openapi.json", "/v1/nothing", "/health/", "//health")
    for method, path in [("POST", "/v1/chat/completions"), *(("GET", path) for path in paths)]:
        response = LOCAL.request(method, guarded.url + path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key" and KEY not in response.text
    assert LOCAL.get(f"{guarded.url}/health", headers=headers).status_code == 200
    assert server.counts()["asked"] == 0


def test_with_the_key_all_routes_are_open(guarded):
    with guarded.client() as client:
        assert guarded.ask(client, "Solo").status_code == 200
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200
    lower = {"authorization": f"bearer {KEY}"}
    assert LOCAL.get(f"{guarded.url}/v1/models", headers=lower).status_code == 200, "the scheme's case does not matter"


def test_a_body_of_50_mb_is_refused(open_gateway, server):
    with open_gateway.client() as client:
        assert client.post("/v1/chat/completions", content=b" " * (50 << 20)).status_code == 413
        chunks = (b" " * (1 << 20) for _ in range(50))  # of no declared length
        response = client.post("/v1/chat/completions", content=chunks)
        assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
        assert open_gateway.ask(client, "Solo").status_code == 200
    assert server.counts()["asked"] == 1


def test_too_many_requests_at_once_are_refused(guarded, server):
    server.mode("hold")
    answers = []
    with guarded.client(limits=httpx.Limits(max_connections=None)) as client:
        threads = [threading.Thread(target=lambda: answers.append(guarded.ask(client, "Solo"))) for _ in range(40)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(answers) >= 40 - 8)  # the refused ones are answered at once
        server.mode("ok")
        for thread in threads:
            thread.join()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    assert len(refused) >= 40 - 8, "at most 8 are in progress, over both workers"
    assert set(guarded.ask_many("Solo", 4, 4)) == {200}


def test_workers_count_together(guarded, server):
    name = 'paco_gateway_requests_total{model="Solo",status="200"}'
    before = guarded.metrics().get(name, 0)
    assert guarded.ask_many("Solo", 40, 4) == [200] * 40
    assert [guarded.metrics()[name] for _ in range(4)] == [before + 40] * 4, "whichever worker is asked"


def test_a_killed_worker_is_replaced_and_forgotten(guarded, server):
    server.mode("hang")
    workers = children(guarded.process.pid)
    asking = guarded.curl()
    wait_for(lambda: guarded.metrics()["paco_gateway_in_flight"] == 1)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert asking.wait() != 0
    wait_for(lambda: len(new := children(guarded.process.pid)) == 2 and not set(new) & set(workers))
    wait_for(lambda: health(guarded.url) == 200)
    assert guarded.metrics()["paco_gateway_in_flight"] == 0
    server.mode("ok")
    assert set(guarded.ask_many("Solo", 8, 4)) == {200}


def children(pid: int) -> list[int]:
    """The worker processes of a gateway."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "spawn_main"], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_waits_for_requests_in_progress(server, workers):
    gateway = GatewayProcess({"Solo": [server]}, "--workers", workers)
    server.mode("hold")
    asking = gateway.curl()
    wait_for(lambda: server.counts()["in_flight"] == 1)
    gateway.process.send_signal(signal.SIGTERM)
    if workers == "1":  # with several, uvicorn keeps the port open until the end
        wait_for(lambda: refuses_connections(gateway.port), 10)
    assert asking.poll() is None
    server.mode("ok")
    assert gateway.process.wait(timeout=30) == 0
    assert asking.communicate()[0].startswith(b"HTTP/1.1 200")


def test_sigterm_does_not_wait_forever(server):
    gateway = GatewayProcess({"Solo": [server]}, "--drain", "1")
    server.mode("hang")
    asking = gateway.curl()
    wait_for(lambda: server.counts()["in_flight"] == 1)
    assert gateway.stop() == 0
    answer = asking.communicate()[0]
    assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer


def refuses_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("upstream", ["Judge", "=http://a:1", "Judge=https://a:1", "Judge=http://a"])
def test_a_bad_upstream_is_refused(upstream, monkeypatch, capsys):
    from vllm_server import gateway_fastapi

    monkeypatch.setattr("sys.argv", ["gateway", "--upstream", upstream])
    assert gateway_fastapi.main() == 1 and repr(upstream) in capsys.readouterr().err
