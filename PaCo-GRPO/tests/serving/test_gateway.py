"""The gateway between real processes: routing, streaming, OpenAI's formats, metrics."""

import json
import subprocess
import time

import httpx
import pytest
from gateway_tools import GatewayProcess
from serving_tools import wait_for


@pytest.fixture(scope="module")
def gateway(servers):
    """``Solo`` has one replica, ``Pair`` two; ``Adapter`` is served by Solo's server."""
    gateway = GatewayProcess(
        {"Solo": servers[:1], "Adapter": servers[:1], "Pair": servers[1:]}, "--request-timeout", "3"
    )
    yield gateway
    gateway.stop()


def port_of(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["said"]["port"]


def test_requests_go_to_the_model_they_name(gateway, client, servers):
    assert port_of(gateway.ask(client, "Solo")) == servers[0].port
    assert port_of(gateway.ask(client, "Adapter")) == servers[0].port
    assert {port_of(gateway.ask(client, "Pair")) for _ in range(4)} == {server.port for server in servers[1:]}
    response = gateway.ask(client, "Solo", top_logprobs=20, extra="\N{SNOWMAN}")
    assert response.json()["said"]["keys"] == ["extra", "messages", "model", "top_logprobs"], "the body is as it was"


@pytest.mark.parametrize(
    ("body", "status", "message", "param"),
    [
        (b'{"model": "solo"}', 404, "model 'solo' is not served here; served: Solo, Adapter, Pair", "model"),
        (b'{"messages": []}', 400, "model must be a string", "model"),
        (b'{"model": 7}', 400, "model must be a string", "model"),
        (b"[]", 400, "must be a JSON object", None),
        (b"", 400, "not JSON", None),
        (b'{"model": "Solo"', 400, "not JSON", None),
        (b'{"model": "\xff"}', 400, "not JSON", None),
        (b"[" * 100_000, 400, "not JSON", None),
    ],
)
def test_what_cannot_be_routed_is_said_as_openai_says_it(client, body, status, message, param):
    response = client.post("/v1/chat/completions", content=body)
    error = response.json()["error"]
    assert response.status_code == status and message in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param


def test_a_nested_model_is_not_the_model(gateway, client, servers):
    body = b'{"messages": [{"model": "Pair", "content": "\\"model\\": \\"Pair\\""}], "model": "Solo"}'
    assert port_of(client.post("/v1/chat/completions", content=body)) == servers[0].port


def test_models_and_health(client):
    models = client.get("/v1/models").json()
    assert [row["id"] for row in models["data"]] == ["Solo", "Adapter", "Pair"]
    assert models["object"] == "list" and {row["object"] for row in models["data"]} == {"model"}
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["models"]["Pair"] == {"replicas": 2, "serving": 2}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/chat/completions", 405), ("GET", "/v1/nothing", 404), ("PUT", "/health", 405)]
)
def test_other_routes_are_refused_and_known_ones_named(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    assert "POST /v1/chat/completions" in response.json()["error"]["message"]
    assert status != 405 or response.headers["allow"]


def test_engines_refusals_pass_as_they_are(gateway, client, servers):
    servers[0].mode("400")
    assert gateway.ask(client, "Solo").json() == {"error": {"message": "no", "type": "x", "param": None, "code": None}}
    servers[0].mode("429")
    response = gateway.ask(client, "Solo")
    assert response.status_code == 429 and response.headers["retry-after"] == "7"
    assert gateway.up("Solo") == 1, "a refusal is no failure of the replica"


def test_events_are_passed_on_as_they_are_made(gateway, client, servers):
    servers[0].mode("stream:0.3")
    arrived, events = [], []
    with client.stream("POST", "/v1/chat/completions", json={"model": "Solo", "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        for line in response.iter_lines():
            if line:
                arrived.append(time.time())
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    made = [json.loads(event)["made"] for event in events]
    assert [json.loads(event)["number"] for event in events] == [0, 1, 2, 3, 4]
    assert arrived[0] < made[-1] - 0.5, "the first came before the last was made"
    assert all(came - when < 0.25 for came, when in zip(arrived[:-1], made, strict=True))


def test_the_least_busy_replica_is_asked(gateway, client, servers):
    servers[1].mode("hold")
    command = ["curl", "-s", "-d", '{"model": "Pair"}', gateway.chat_url]
    busy = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]  # one of them meets the busy one
    wait_for(lambda: servers[1].counts()["in_hand"] == 1)
    assert {port_of(gateway.ask(client, "Pair")) for _ in range(10)} == {servers[2].port}
    servers[1].mode("ok")
    assert all(b'"port"' in one.communicate()[0] for one in busy)


def test_connections_to_servers_are_kept(gateway, client, servers):
    for _ in range(20):
        assert port_of(gateway.ask(client, "Solo"))
    assert servers[0].counts()["connections"] <= 4, "the pool's, the probe's, and the one that asks this"


def test_a_caller_who_leaves_is_not_worked_for(gateway, client, servers):
    servers[0].mode("hang")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json={"model": "Solo"}, timeout=0.5)
    wait_for(lambda: servers[0].counts()["abandoned"] == 1, 10)
    wait_for(lambda: gateway.metrics()["paco_gateway_in_flight"] == 0, 10)
    assert gateway.metrics()['paco_gateway_errors_total{kind="client_closed"}'] >= 1
    assert gateway.up("Solo") == 1, "the replica did nothing wrong"


def test_an_answer_that_does_not_come_is_a_timeout(gateway, client, servers):
    servers[0].mode("hang")
    start = time.monotonic()
    response = gateway.ask(client, "Solo")
    assert response.status_code == 504 and "VLLM_REQUEST_TIMEOUT" in response.json()["error"]["message"]
    assert 2.9 < time.monotonic() - start < 20
    wait_for(lambda: servers[0].counts()["abandoned"] == 1, 10)


def test_metrics_count_what_was_asked(gateway, client):
    before = gateway.metrics()
    for _ in range(3):
        gateway.ask(client, "Solo")
    gateway.ask(client, "Nobody's")
    after = gateway.metrics()

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more('paco_gateway_requests_total{model="Solo",status="200"}') == 3
    assert more('paco_gateway_request_seconds_count{model="Solo"}') == 3
    assert more('paco_gateway_request_seconds_bucket{le="10.0",model="Solo"}') == 3
    assert more('paco_gateway_requests_total{model="unknown",status="404"}') == 1
    assert more('paco_gateway_errors_total{kind="model_not_found"}') == 1
    assert after["paco_gateway_in_flight"] == 0
    assert "Nobody" not in "".join(after), "callers cannot invent labels"


def test_curl_and_its_expectations(gateway, client):
    """curl asks whether it may go on before it sends a body of more than 1 MB."""
    body = json.dumps({"model": "Solo", "messages": ["x" * 2_000_000]})
    command = ["curl", "-sS", "-H", "Expect: 100-continue", "--data-binary", "@-", gateway.chat_url]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["said"]["keys"] == ["messages", "model"]
