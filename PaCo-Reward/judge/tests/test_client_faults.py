"""The client against servers that go wrong: real sockets and processes on loopback."""

import contextlib
import importlib.util
import logging
import socket
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paco_judge.client import JudgeClient, JudgeUnavailable, Pair

FAKE = Path(__file__).with_name("fake_judge.py")
_spec = importlib.util.spec_from_file_location("fake_judge", FAKE)
fake_judge = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_judge)
FakeJudge, answer = fake_judge.FakeJudge, fake_judge.answer
MODEL = "Paco-Reward-7B"


def pairs(count: int, question: str) -> list[Pair]:
    pixels = np.random.default_rng(zlib.crc32(question.encode())).integers(0, 256, (count + 1, 8, 8, 3), dtype=np.uint8)
    images = [Image.fromarray(each) for each in pixels]
    return [Pair(images[0], image, question) for image in images[1:]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def judge_process(port: int, delay_s: float = 0.0):
    process = subprocess.Popen([sys.executable, str(FAKE), str(port), str(delay_s)])
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


class RawServer:
    """Sends the same bytes to whoever connects, once the request has begun; ``hold``: then keeps the line open."""

    def __init__(self, sent: bytes, hold: bool = False):
        self.sent, self.hold, self.connections = sent, hold, []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.connections.append(connection)
                connection.recv(1 << 16)
                connection.sendall(self.sent)
                if not self.hold:
                    connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()
        for connection in self.connections:
            connection.close()


def resolved(url: str, **settings) -> JudgeClient:
    """A client that has asked a good server for its models, pointed at ``url`` afterwards."""
    with FakeJudge() as good:
        client = JudgeClient(good.url, model=MODEL, **settings)
        client.check()
    client.base_url, client._chat_url = url, f"{url}/v1/chat/completions"
    return client


def in_thread(client: JudgeClient, asked: list[Pair]) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(client.score_blocking(asked)))
    thread.start()
    return thread, found


def test_the_only_server_killed_under_load_and_restarted_within_the_deadline(caplog):
    port = free_port()
    with caplog.at_level(logging.WARNING, "paco_judge"):
        with judge_process(port, delay_s=0.05) as first:
            client = JudgeClient(f"http://127.0.0.1:{port}", model=MODEL, max_concurrency=4, deadline_s=40)
            client.check()
            thread, verdicts = in_thread(client, pairs(60, "killed"))
            time.sleep(0.3)
            first.kill()
            first.wait()
            time.sleep(1.0)
            assert thread.is_alive() and not verdicts
            assert f"no judge answers at http://127.0.0.1:{port}" in caplog.text, "said at once, not at the deadline"
        with judge_process(port):
            thread.join(timeout=35)
    assert len(verdicts) == 60 and all(verdict.ok for verdict in verdicts)
    assert caplog.text.count("no judge answers") == 1, "once, however many requests met it"
    assert "answers again, after" in caplog.text


def test_a_server_that_is_gone_is_waited_for_once_and_not_by_every_batch(caplog):
    with FakeJudge() as judge:
        client = JudgeClient(judge.url, model=MODEL, deadline_s=2.0)
        client.check()
        port = judge.port
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "paco_judge"):
        first = client.score_blocking(pairs(8, "gone 1"))
    waited = time.monotonic() - start
    assert 1.0 < waited < 4.0 and not any(verdict.ok for verdict in first)
    assert "ConnectionRefusedError" in first[0].error
    record = next(record for record in caplog.records if "no judge answers" in record.message)
    assert "launch.sh" in record.message
    time.sleep(max(0.0, 2.1 - waited))
    start = time.monotonic()
    second = client.score_blocking(pairs(8, "gone 2"))
    assert time.monotonic() - start < 1.0, "the server has been gone for longer than the deadline"
    assert "the server has been gone for" in second[0].error
    with FakeJudge(port=port):
        assert all(verdict.ok for verdict in client.score_blocking(pairs(8, "gone 3"))), "back again"
    start = time.monotonic()
    client.score_blocking(pairs(2, "gone 4"))
    assert time.monotonic() - start > 1.0, "a new absence is waited for anew"


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
    ],
    ids=["not http", "half an answer", "closed at once"],
)
def test_a_line_that_breaks_is_tried_again_until_the_deadline_and_named(sent, cause):
    with RawServer(sent) as server:
        client = resolved(server.url, deadline_s=1.0)
        (verdict,) = client.score_blocking(pairs(1, f"raw {cause} {sent!r}"))
        assert cause in verdict.error and "deadline" in verdict.error
        assert len(server.connections) > 1


def test_a_server_that_stops_in_the_middle_is_bounded():
    with RawServer(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", hold=True) as server:
        client = resolved(server.url, deadline_s=1.0)
        start = time.monotonic()
        (verdict,) = client.score_blocking(pairs(1, "stuck"))
        assert 0.9 < time.monotonic() - start < 2.5 and "deadline" in verdict.error


def test_an_unanswered_request_is_asked_again():
    with FakeJudge(lambda number, request: None if number <= 2 else (200, answer(0.5), {})) as judge:
        client = JudgeClient(judge.url, model=MODEL, deadline_s=20.0)
        assert client.score_blocking(pairs(1, "unanswered"))[0].ok and len(judge.requests) == 3


def test_a_wrong_key_is_said_at_the_start_and_not_tried_again():
    with FakeJudge(key="right") as judge:
        with pytest.raises(JudgeUnavailable, match="a valid API key is needed; check api_key"):
            JudgeClient(judge.url, model=MODEL, api_key="wrong").check()
        client = JudgeClient(judge.url, model=MODEL, api_key="right")
        assert client.score_blocking(pairs(1, "key"))[0].ok
        judge.key = "changed"
        (verdict,) = client.score_blocking(pairs(1, "key changed"))
        assert "HTTP 401" in verdict.error and len(judge.requests) == 2


def test_a_retry_after_beyond_the_deadline_ends_at_once():
    with FakeJudge(lambda number, request: (429, {"error": {"message": "full"}}, {"retry-after": "60"})) as judge:
        client = JudgeClient(judge.url, model=MODEL, deadline_s=20.0)
        start = time.monotonic()
        (verdict,) = client.score_blocking(pairs(1, "later"))
        assert time.monotonic() - start < 2 and "HTTP 429: full" in verdict.error


def test_some_500s_cost_only_time():
    def respond(number, request):
        return (500, {"error": {"message": "oops"}}, {}) if number % 3 == 0 else (200, answer(0.5), {})

    with FakeJudge(respond) as judge:
        verdicts = JudgeClient(judge.url, model=MODEL, deadline_s=20.0).score_blocking(pairs(20, "some 500s"))
        assert all(verdict.ok for verdict in verdicts) and len(judge.requests) > 20


def test_the_models_are_asked_for_once_by_many_threads():
    with FakeJudge(delay_s=0.2) as judge:
        client = JudgeClient(judge.url, model=MODEL)
        threads = [in_thread(client, pairs(1, f"thread {number}"))[0] for number in range(8)]
        for thread in threads:
            thread.join(timeout=20)
        assert (judge.model_requests, len(judge.requests)) == (1, 8)


_WAITING_AT_EXIT = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from paco_judge.client import JudgeClient, Pair
image = Image.new("RGB", (8, 8))
client = JudgeClient(sys.argv[1], model=sys.argv[2], deadline_s=60)
client.check()
pool = ThreadPoolExecutor(1)
pool.submit(client.score_blocking, [Pair(image, image, "q")])
time.sleep(0.3)
pool.shutdown(wait=False, cancel_futures=True)
"""


def test_a_thread_that_waits_for_scores_does_not_hold_up_the_end_of_the_process():
    released = threading.Event()
    with FakeJudge(lambda number, request: released.wait(60)) as judge:
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", _WAITING_AT_EXIT, judge.url, MODEL], check=True, timeout=50)
        assert time.monotonic() - start < 40
        released.set()
