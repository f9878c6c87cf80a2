"""Servers that fail behind the gateway, in every way we could think of: nothing is lost while another one lives."""

import asyncio
import json
import os
import signal

import aiohttp
import pytest
from gateway_tools import LOCAL, GatewayProcess
from serving_tools import wait_for


@pytest.fixture(scope="module")
def gateway(servers):
    gateway = GatewayProcess({"Solo": servers[:1], "Pair": servers[1:]})
    yield gateway
    gateway.stop()


def ask_many(gateway: GatewayProcess, model: str, count: int, at_once: int) -> list[int]:
    """Status of each of ``count`` requests; 0 for a broken connection."""

    async def ask() -> list[int]:
        connector = aiohttp.TCPConnector(limit=at_once)
        async with aiohttp.ClientSession(connector=connector, headers=gateway.headers) as session:
            return await asyncio.gather(*[one(session, number) for number in range(count)])

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        try:
            async with session.post(gateway.chat_url, json={"model": model, "id": number}) as response:
                if response.status == 200:
                    assert (await response.json())["said"]["id"] == number, "everybody gets the own answer"
                return response.status
        except aiohttp.ClientError:
            return 0

    return asyncio.run(ask())


FAULTS = ("garbage", "text", "half", "close", "500")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_replica_costs_no_request_and_is_let_back(gateway, client, servers, fault):
    broken, sound = servers[1:]
    broken.mode(fault)
    before = gateway.metrics()
    assert set(ask_many(gateway, "Pair", 30, 4)) == {200}
    seen = broken.counts()["asked"]
    assert 1 <= seen < 15, "it is out for longer each time it fails"
    assert sound.counts()["asked"] == 30
    more = gateway.metrics()['paco_gateway_retries_total{model="Pair"}']
    assert more - before.get('paco_gateway_retries_total{model="Pair"}', 0) == seen
    broken.mode("ok")
    wait_for(lambda: gateway.up("Pair") == 2, 20)
    assert set(ask_many(gateway, "Pair", 10, 4)) == {200}
    assert broken.counts()["asked"] > 0, "and gets requests again"


@pytest.mark.parametrize(("fault", "status"), [*[(fault, 502) for fault in FAULTS[:-1]], ("500", 500)])
def test_without_another_replica_the_cause_is_said(gateway, client, servers, fault, status):
    servers[0].mode(fault)
    response = gateway.ask(client, "Solo")
    error = response.json()["error"]
    assert response.status_code == status and error["type"] == "server_error"
    assert ("the server answered 500: Internal Server Error" if status == 500 else "no replica") in error["message"]


def test_a_replica_killed_under_load_costs_no_request(gateway, client, servers):
    victim, _ = servers[1:]
    for server in servers[1:]:
        server.mode("slow:0.05")

    async def kill_soon() -> list[int]:
        asking = asyncio.create_task(asyncio.to_thread(ask_many, gateway, "Pair", 300, 32))
        while (await asyncio.to_thread(victim.counts))["asked"] < 20:
            await asyncio.sleep(0.01)
        os.kill(victim.process.pid, signal.SIGKILL)
        return await asking

    assert asyncio.run(kill_soon()) == [200] * 300
    victim.process.wait()
    wait_for(lambda: gateway.up("Pair") == 1)
    health = LOCAL.get(f"{gateway.url}/health")
    assert health.status_code == 200 and health.json()["models"]["Pair"] == {"replicas": 2, "serving": 1}
    victim.start()
    wait_for(lambda: gateway.up("Pair") == 2)
    assert set(ask_many(gateway, "Pair", 10, 4)) == {200} and victim.counts()["asked"] > 0


def test_the_only_server_killed_and_started_again(gateway, client, servers):
    servers[0].kill()
    wait_for(lambda: LOCAL.get(f"{gateway.url}/health").status_code == 503)
    assert LOCAL.get(f"{gateway.url}/health").json()["models"]["Solo"] == {"replicas": 1, "serving": 0}
    response = gateway.ask(client, "Solo")
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert "no replica of 'Solo' is up" in response.json()["error"]["message"]
    assert gateway.ask(client, "Pair").status_code == 200, "other models go on"
    servers[0].start()
    wait_for(lambda: gateway.ask(client, "Solo").status_code == 200)
    assert LOCAL.get(f"{gateway.url}/health").status_code == 200


def test_a_stuck_server_is_found_by_its_silence_and_its_requests_go_elsewhere(gateway, client, servers):
    stuck, sound = servers[1:]
    stuck.mode("stuck")
    assert set(ask_many(gateway, "Pair", 8, 8)) == {200}, "those in the stuck server's hands are asked again"
    assert sound.counts()["asked"] == 8 and stuck.counts()["abandoned"] >= 1
    assert gateway.up("Pair") == 1
    stuck.mode("ok")
    wait_for(lambda: gateway.up("Pair") == 2)


def test_a_server_that_says_it_is_unhealthy_is_out(gateway, client, servers):
    servers[1].mode("sick")
    wait_for(lambda: gateway.up("Pair") == 1)
    assert set(ask_many(gateway, "Pair", 6, 2)) == {200} and servers[1].counts()["asked"] == 0


def test_a_stream_that_breaks_says_so(gateway, client, servers):
    servers[0].mode("broken:0.05")
    with client.stream("POST", "/v1/chat/completions", json={"model": "Solo", "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert [json.loads(event).get("number") for event in events[:-1]] == [0, 1]
    error = json.loads(events[-1])["error"]
    assert "the answer broke off" in error["message"] and error["type"] == "server_error"


def test_a_stream_that_has_not_begun_is_asked_of_another(gateway, client, servers):
    servers[1].mode("close")
    servers[2].mode("stream:0.01")
    for _ in range(2):
        with client.stream("POST", "/v1/chat/completions", json={"model": "Pair", "stream": True}) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
