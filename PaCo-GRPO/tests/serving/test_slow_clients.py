"""Slow, endless and half-open callers: each is limited, and none keeps others out of gateway, engine or reward service.

The limits are tested on a small application in this process, with short times; the servers as processes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import httpx
import pytest
import uvicorn
from engine_tools import chat_body
from gateway_tools import Upstream, health
from serving_tools import REPO, ROOT, free_port, wait_for

from paco_grpo import asgi
from paco_grpo.asgi import SERVER_SETTINGS, ApiError, Bodies


class Small:
    """A small application on the real server: answers with the length of the body, after ``hold``."""

    def __init__(self, bodies: Bodies):
        self.bodies, self.hold = bodies, asyncio.Event()
        self.hold.set()
        self.answer = b"length %d"
        self.pages = 0  # of an answer; until the caller has gone

    async def __call__(self, scope, receive, send):
        try:
            async with self.bodies.read(scope, receive) as body:
                await self.hold.wait()
            text = self.answer % len(body)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self.pages):
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
            await send({"type": "http.response.body", "body": text})
        except ApiError as error:
            await error(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(app):
    """The port of a server with our settings on this loop, and the server."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error", **SERVER_SETTINGS))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1], server
    server.should_exit = server.force_exit = True
    await running


@pytest.fixture
async def small(monkeypatch):
    for name, value in {"HEAD_S": 0.3, "WRITE_S": 0.3}.items():
        monkeypatch.setattr(asgi, name, value)
    app = Small(Bodies(1 << 16, timeout_s=0.5))
    async with asyncio.timeout(60), serving(app) as (port, server):
        app.port, app.server = port, server
        yield app


async def talk(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            received += part
    writer.close()
    return received


HEAD = b"POST / HTTP/1.1\r\nhost: a\r\n"
CLOSE = b"connection: close\r\n"


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"\r\n"], [b"POST / HT"], [HEAD], [HEAD + b"content-length: 0\r\n\r\n", b"POST /"],
     [HEAD + b"content-length: 0\r\n\r\n", b"\r\n"]],
    ids=["nothing", "an empty line", "half a line", "half a head", "half a second head", "an empty line later"],
)  # fmt: skip
async def test_a_head_has_limited_time(small, parts):
    began = time.monotonic()
    await talk(small.port, *parts, pause=0.1)
    assert time.monotonic() - began < 10


async def test_a_dripping_head_has_limited_time_too(small):
    began = time.monotonic()
    await talk(small.port, HEAD, *[b"x-a: 1\r\n"] * 100, pause=0.1)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD + b"x-a: " + b"a" * 100_000 + b"\r\n\r\n"],
        [HEAD, *[b"x-a: " + b"a" * 5000 + b"\r\n"] * 40],
        [HEAD + b"x-a: ", *[b"a" * 50_000] * 40],
        [b"GET /" + b"a" * 200_000],
        [HEAD + b"".join(b"x-%d: a\r\n" % number for number in range(20_000)) + b"\r\n"],
    ],
)
async def test_a_head_has_limited_size(small, parts):
    answer = await talk(small.port, *parts)
    # A server that closes while its caller still sends may cost the caller the answer.
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 431") and b'"invalid_request_error"' in answer)
    assert b"200 OK" not in answer


async def test_chunk_extensions_and_trailers_have_limited_size(small):
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    for parts in (
        [chunked, b"1;" + b"a" * 50_000, *[b"a" * 50_000] * 4],
        [chunked, b"1\r\na\r\n0\r\nx-a: ", *[b"a" * 50_000] * 4],
        [chunked, b"1\r\na\r\n0\r\n", *[b"x-a: " + b"a" * 5000 + b"\r\n"] * 40],
    ):
        assert b"200 OK" not in await talk(small.port, *parts, pause=0.01)


async def test_what_is_no_http_is_an_error_in_the_format_of_the_others(small):
    answer = await talk(small.port, b"\x16\x03\x01 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and b'{"error": {"message"' in answer


@pytest.mark.parametrize("framing", [b"content-length: 1000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n5\r\n"])
async def test_a_body_has_limited_time(small, framing):
    began = time.monotonic()
    answer = await talk(small.port, HEAD + CLOSE + framing, *[b"a"] * 30, pause=0.1)
    assert time.monotonic() - began < 20
    assert answer == b"" or b" 408 " in answer


async def test_the_rest_of_a_refused_body_is_read_for_a_limited_time(small):
    """Answered with 413 at once; what keeps coming is thrown away, and then the connection is closed."""
    began = time.monotonic()
    head = HEAD + b"content-length: 1000000000\r\n\r\n"
    answer = await talk(small.port, head, *[b"a" * 10_000] * 100, pause=0.05)
    assert answer == b"" or b" 413 " in answer
    assert time.monotonic() - began < 30


async def test_who_does_not_read_the_answer_is_cut_off(small):
    small.pages = 100  # 100 MB, more than the kernel's buffers hold
    _, writer = await asyncio.open_connection("127.0.0.1", small.port, limit=1 << 10)
    writer.write(HEAD + b"content-length: 0\r\n\r\n")
    await wait_until(lambda: small.server.server_state.connections)
    await wait_until(lambda: not small.server.server_state.connections)
    writer.close()


async def wait_until(condition, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_bodies_are_bounded_together_and_the_slowest_makes_room(small):
    small.bodies.total, small.bodies.timeout_s = 100_000, 30
    framing = HEAD + CLOSE + b"content-length: 65000\r\n\r\n"
    slow = [asyncio.create_task(talk(small.port, framing, b"a" * 40_000)) for _ in range(2)]
    await wait_until(lambda: small.bodies.held == 80_000)
    whole = await talk(small.port, framing, b"a" * 65_000)
    assert whole.endswith(b"length 65000\r\n0\r\n\r\n"), "the one that came last and sends is answered"
    done, _ = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
    assert all(b" 429 " in task.result() and b"retry-after" in task.result() for task in done)
    for task in slow:
        task.cancel()


async def test_nothing_is_left_counted(small):
    small.hold.clear()
    asked = [asyncio.create_task(talk(small.port, HEAD + CLOSE + b"content-length: 9\r\n\r\n" + b"a" * 9)) for _ in range(5)]
    await wait_until(lambda: small.bodies.held == 45)
    small.hold.set()
    await asyncio.wait(asked)
    await talk(small.port, HEAD + CLOSE + b"content-length: 9\r\n\r\n", b"a")
    await wait_until(lambda: not small.server.server_state.connections)
    assert small.bodies.held == 0 and not small.bodies._arriving


async def test_idle_connections_make_room_and_busy_ones_stay(small, monkeypatch):
    monkeypatch.setattr(asgi, "HEAD_S", 60)
    monkeypatch.setattr(asgi, "connection_limit", lambda: 20)
    small.hold.clear()
    busy = asyncio.create_task(talk(small.port, HEAD + CLOSE + b"content-length: 4\r\n\r\nbusy"))
    await wait_until(lambda: small.bodies.held == 4)
    idle = [await asyncio.open_connection("127.0.0.1", small.port) for _ in range(60)]
    await wait_until(lambda: len(small.server.server_state.connections) <= 20)
    small.hold.set()
    assert (await busy).endswith(b"length 4\r\n0\r\n\r\n")
    assert b"length 3" in await talk(small.port, HEAD + CLOSE + b"content-length: 3\r\n\r\nnew")
    for _, writer in idle:
        writer.close()


async def test_expect_100_continue_and_pipelined_requests(small):
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(HEAD + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(b"12345")
    assert b"length 5" in await reader.readuntil(b"0\r\n\r\n")
    one = HEAD + b"content-length: 1\r\n\r\na"
    writer.write(one * 3)
    for _ in range(3):
        assert b"length 1" in await reader.readuntil(b"0\r\n\r\n")
    writer.close()


# The servers.

OPEN_FILES = 300  # hence 86 connections


@contextlib.contextmanager
def process(command: list[str], url: str, **environment):
    """A server that may open few files."""
    limited = ["bash", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "server", sys.executable, *command]
    paths = os.pathsep.join(map(str, (ROOT, REPO / "PaCo-Reward" / "judge")))
    server = subprocess.Popen(limited, env=os.environ | {"PYTHONPATH": paths} | environment, start_new_session=True)
    try:
        wait_for(lambda: server.poll() is not None or health(url) == 200, 300)
        assert server.poll() is None
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


@pytest.fixture(scope="module", params=["gateway", "engine", "reward service"])
def server(request):
    """(URL, path, body) of a request that each answers with 200."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    if request.param == "gateway":
        upstream = Upstream().start()
        command = ["-m", "vllm_server.gateway_fastapi", "--port", str(port), "--max-concurrent", "8"]
        with process([*command, "--upstream", f"Tiny-Judge={upstream.url}"], url):
            yield url, "/v1/chat/completions", {"model": "Tiny-Judge"}
        upstream.kill()
    elif request.param == "engine":
        folder, tiny = request.getfixturevalue("judge_folder"), request.getfixturevalue("tiny")
        command = ["-m", "vllm_server.transformers_engine", "--model", str(folder), "--port", str(port)]
        with process([*command, "--served-model-name", "Tiny-Judge", "--max-model-len", "1024"], url):
            yield url, "/v1/chat/completions", chat_body(tiny, max_tokens=1)
    else:
        command = ["-m", "paco_grpo.rewards.remote.service", "--reward", "jpeg_compressibility", "--port", str(port)]
        with process(command, url):
            yield url, "/score", {"items": [], "images": []}


def test_slow_callers_do_not_keep_others_out(server):
    """Half-open connections, half heads and half bodies, three times as many as the server has connections."""
    url, path, body = server
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    half_head = f"POST {path} HTTP/1.1\r\nhost: a\r\n".encode()
    half_body = half_head + b"content-length: 100000\r\n\r\n" + b" " * 1000
    held = []
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as idle:
            assert idle.post(path, json=body).status_code == 200
            for number in range(270):
                held.append(socket.create_connection(address))
                held[-1].sendall((b"", half_head, half_body)[number % 3])
                if number % 30 == 29:
                    with httpx.Client(base_url=url, trust_env=False, timeout=30) as http:
                        answers = [http.post(path, json=body) for _ in range(3)]
                    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
            assert idle.get("/health").status_code == 200
    finally:
        for connection in held:
            connection.close()


def test_500_requests_at_once_over_reused_connections(server):
    url, path, body = server

    async def ask() -> list[int]:
        async def one(http: aiohttp.ClientSession) -> int:
            async with http.post(url + path, json=body) as answer:
                await answer.read()
                return answer.status

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=60)) as http:
            return await asyncio.gather(*(one(http) for _ in range(500)))

    found = asyncio.run(ask())
    assert set(found) <= {200, 429} and found.count(200) >= 8
    assert found.count(200) == 500 or body == {"model": "Tiny-Judge"}, "only the gateway has a limit, of 8 here"
