"""The gateway between real processes: routing, streaming, OpenAI's formats, metrics; servers that fail behind it.

``Solo`` has one replica, ``Pair`` two; ``Adapter`` is served by Solo's server.
"""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gateway_tools import LOCAL, GatewayProcess, Upstream, health
from serving_tools import wait_for


@pytest.fixture(scope="module")
def servers():
    """Three servers whose faults a test chooses."""
    servers = [Upstream().start() for _ in range(3)]
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def gateway(servers):
    models = {"Solo": servers[:1], "Adapter": servers[:1], "Pair": servers[1:]}
    gateway = GatewayProcess(models, "--request-timeout", "8")
    yield gateway
    gateway.stop()


@pytest.fixture
def client(gateway, servers):
    """A client, while all servers work."""
    for server in servers:
        server.mode("ok")
    wait_for(lambda: (gateway.up("Solo"), gateway.up("Pair")) == (1, 2))
    with gateway.client() as client:
        yield client


def port_of(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["seen"]["port"]


def test_requests_go_to_the_model_they_name(gateway, client, servers):
    assert port_of(gateway.ask(client, "Solo")) == servers[0].port
    assert port_of(gateway.ask(client, "Adapter")) == servers[0].port
    assert {port_of(gateway.ask(client, "Pair")) for _ in range(4)} == {server.port for server in servers[1:]}
    response = gateway.ask(client, "Solo", top_logprobs=20, extra="\N{SNOWMAN}")
    assert response.json()["seen"]["keys"] == ["extra", "messages", "model", "top_logprobs"], "the body is unchanged"
    nested = b'{"messages": [{"model": "Pair", "content": "\\"model\\": \\"Pair\\""}], "model": "Solo"}'
    assert port_of(client.post("/v1/chat/completions", content=nested)) == servers[0].port


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"model": "solo"}', 404, "model"),
        (b'{"messages": []}', 400, "model"),
        (b'{"model": 7}', 400, "model"),
        *[(body, 400, None) for body in (b"[]", b"", b'{"model": "Solo"', b'{"model": "\xff"}', b"[" * 100_000)],
    ],
)
def test_requests_that_cannot_be_routed_are_refused_in_openais_format(client, body, status, param):
    response = client.post("/v1/chat/completions", content=body)
    error = response.json()["error"]
    assert response.status_code == status
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param
    assert status != 404 or "Solo, Adapter, Pair" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_other_routes_of_the_engine_are_passed_on(client, servers, path):
    assert port_of(client.post(path, json={"model": "Solo", "input": "a fox"})) == servers[0].port
    assert servers[0].counts()["path"] == path
    assert client.post(path, json={"model": "Nobody's"}).status_code == 404


def test_models_and_health(client):
    assert client.get("/").json()["models"] == ["Solo", "Adapter", "Pair"]
    models = client.get("/v1/models").json()
    assert [row["id"] for row in models["data"]] == ["Solo", "Adapter", "Pair"]
    assert models["object"] == "list" and {row["object"] for row in models["data"]} == {"model"}
    response = client.get("/health")
    assert response.status_code == 200 and response.json()["models"]["Pair"] == {"replicas": 2, "serving": 2}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("GET", "/v1/nothing", 404), ("PUT", "/health", 405),
     ("POST", "/v1/%2e%2e/sleep", 404)],
)  # fmt: skip
def test_other_routes_are_refused(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    assert "POST /v1/chat/completions" in response.json()["error"]["message"]
    assert status != 405 or response.headers["allow"]


def test_an_engines_refusal_is_passed_back_unchanged(gateway, client, servers):
    servers[0].mode("400")
    assert gateway.ask(client, "Solo").json() == {"error": {"message": "no", "type": "x", "param": None, "code": None}}
    servers[0].mode("429")
    response = gateway.ask(client, "Solo")
    assert response.status_code == 429 and response.headers["retry-after"] == "7"
    assert gateway.up("Solo") == 1, "a refusal is no failure of the replica"


def test_events_are_passed_on_as_they_come(gateway, client, servers):
    servers[0].mode("stream:0.3")
    arrived, events = [], []
    with client.stream("POST", "/v1/chat/completions", json={"model": "Solo", "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        for line in filter(None, response.iter_lines()):
            arrived.append(time.time())
            events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    assert [json.loads(event)["number"] for event in events] == [0, 1, 2, 3, 4]
    made = [json.loads(event)["made"] for event in events]
    assert arrived[0] < made[-1] - 0.5, "the first came before the last was made"


def test_the_least_busy_replica_is_asked(gateway, client, servers):
    servers[1].mode("hold")
    busy = [gateway.curl("Pair") for _ in range(2)]  # one of them gets the busy replica
    wait_for(lambda: servers[1].counts()["in_flight"] == 1)
    assert {port_of(gateway.ask(client, "Pair")) for _ in range(10)} == {servers[2].port}
    servers[1].mode("ok")
    assert all(b'"port"' in one.communicate()[0] for one in busy)


def test_nobody_works_for_a_caller_who_left(gateway, client, servers):
    servers[0].mode("hang")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json={"model": "Solo"}, timeout=0.5)
    wait_for(lambda: servers[0].counts()["abandoned"] == 1, 10)
    wait_for(lambda: gateway.metrics()["paco_gateway_in_flight"] == 0, 10)
    assert gateway.metrics()['paco_gateway_errors_total{kind="client_closed"}'] >= 1
    assert gateway.up("Solo") == 1, "the replica did nothing wrong"


def test_metrics_count_requests(gateway, client):
    before = gateway.metrics()
    for _ in range(3):
        gateway.ask(client, "Solo")
    gateway.ask(client, "Nobody's")
    after = gateway.metrics()

    def more(name: str) -> float:
        return after[f"paco_gateway_{name}"] - before.get(f"paco_gateway_{name}", 0)

    assert more('requests_total{model="Solo",status="200"}') == 3
    assert more('request_seconds_count{model="Solo"}') == more('first_byte_seconds_count{model="Solo"}') == 3
    assert more('request_seconds_bucket{le="10.0",model="Solo"}') == 3
    assert more('requests_total{model="unknown",status="404"}') == 1
    assert more('errors_total{kind="model_not_found"}') == 1
    assert after["paco_gateway_in_flight"] == 0
    assert "Nobody" not in "".join(after), "callers cannot invent labels"


FAULTS = ("garbage", "text", "half", "close", "500")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_replica_costs_no_request_and_returns(gateway, client, servers, fault):
    broken, sound = servers[1:]
    broken.mode(fault)
    retries = 'paco_gateway_retries_total{model="Pair"}'
    before = gateway.metrics().get(retries, 0)
    assert set(gateway.ask_many("Pair", 30, 4)) == {200}
    seen = broken.counts()["asked"]
    assert 1 <= seen < 15, "it is out for longer each time it fails"
    assert sound.counts()["asked"] == 30
    assert gateway.metrics()[retries] - before == seen
    broken.mode("ok")
    wait_for(lambda: gateway.up("Pair") == 2, 20)
    assert set(gateway.ask_many("Pair", 10, 4)) == {200}
    assert broken.counts()["asked"] > 0


@pytest.mark.parametrize(("fault", "status"), [*[(fault, 502) for fault in FAULTS[:-1]], ("500", 500)])
def test_without_another_replica_the_failure_is_the_answer(gateway, client, servers, fault, status):
    servers[0].mode(fault)
    response = gateway.ask(client, "Solo")
    error = response.json()["error"]
    assert response.status_code == status and error["type"] == "server_error"
    assert ("500" if status == 500 else "'Solo'") in error["message"]


def test_a_replica_killed_under_load_costs_no_request(gateway, client, servers):
    victim, _ = servers[1:]
    for server in servers[1:]:
        server.mode("slow:0.05")

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(gateway.ask_many, "Pair", 150, 32)
        wait_for(lambda: victim.counts()["asked"] >= 20)
        os.kill(victim.process.pid, signal.SIGKILL)
        assert asking.result() == [200] * 150
    victim.process.wait()
    wait_for(lambda: gateway.up("Pair") == 1)
    response = LOCAL.get(f"{gateway.url}/health")
    assert response.status_code == 200 and response.json()["models"]["Pair"] == {"replicas": 2, "serving": 1}
    victim.start()
    wait_for(lambda: gateway.up("Pair") == 2)
    assert set(gateway.ask_many("Pair", 10, 4)) == {200} and victim.counts()["asked"] > 0


def test_all_replicas_are_replaced_one_by_one_under_load_and_no_request_fails():
    """kill -9 of each of three in turn, started again at its address, while eight callers ask all the time."""
    replicas = [Upstream().start() for _ in range(3)]
    gateway = GatewayProcess({"Rolling": replicas})
    try:
        for replica in replicas:
            replica.mode("slow:0.02")
        replaced, statuses = threading.Event(), []

        def ask_on(number: int) -> None:
            with gateway.client() as client:
                while not replaced.is_set():
                    response = gateway.ask(client, "Rolling", id=number)
                    right = response.status_code == 200 and response.json()["seen"]["id"] == number
                    statuses.append(response.status_code if right else -1)

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask_on, number) for number in range(8)]
            try:
                for replica in replicas:
                    wait_for(lambda replica=replica: replica.counts()["asked"] >= 5)
                    replica.kill()
                    wait_for(lambda: gateway.up("Rolling") == 2)
                    replica.start().mode("slow:0.02")
                    wait_for(lambda: gateway.up("Rolling") == 3)
            finally:
                replaced.set()
            for each in asking:
                each.result()
        assert len(statuses) > 50 and set(statuses) == {200}
    finally:
        gateway.stop()
        for replica in replicas:
            replica.kill()


def test_the_only_server_is_killed_and_started_again(gateway, client, servers):
    servers[0].kill()
    wait_for(lambda: health(gateway.url) == 503)
    assert LOCAL.get(f"{gateway.url}/health").json()["models"]["Solo"] == {"replicas": 1, "serving": 0}
    response = gateway.ask(client, "Solo")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "no_replica"
    assert gateway.ask(client, "Pair").status_code == 200, "other models are served"
    servers[0].start()
    wait_for(lambda: gateway.ask(client, "Solo").status_code == 200)
    assert health(gateway.url) == 200


def test_requests_of_a_stuck_server_go_to_another(gateway, client, servers):
    stuck, sound = servers[1:]
    stuck.mode("stuck")
    assert set(gateway.ask_many("Pair", 8, 8)) == {200}
    assert sound.counts()["asked"] == 8 and stuck.counts()["abandoned"] >= 1
    assert gateway.up("Pair") == 1
    stuck.mode("ok")
    wait_for(lambda: gateway.up("Pair") == 2)


def test_a_stream_that_breaks_ends_with_an_error(gateway, client, servers):
    servers[0].mode("broken:0.05")
    with client.stream("POST", "/v1/chat/completions", json={"model": "Solo", "stream": True}) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert [event.get("number") for event in events[:-1]] == [0, 1]
    assert events[-1]["error"]["type"] == "server_error"


def test_a_stream_that_has_not_begun_is_asked_of_another_replica(gateway, client, servers):
    servers[1].mode("close")
    servers[2].mode("stream:0.01")
    for _ in range(2):
        with client.stream("POST", "/v1/chat/completions", json={"model": "Pair", "stream": True}) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")


def test_an_answer_that_does_not_come_is_a_timeout(servers):
    servers[0].mode("ok")
    gateway = GatewayProcess({"Solo": servers[:1]}, "--request-timeout", "1")
    servers[0].mode("hang")
    start = time.monotonic()
    with gateway.client() as client:
        response = gateway.ask(client, "Solo")
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
    assert 0.9 < time.monotonic() - start < 20
    wait_for(lambda: servers[0].counts()["abandoned"] == 1, 10)
    gateway.stop()
