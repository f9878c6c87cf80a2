"""Reward services in other processes, for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from paco_grpo.rewards.registry import build_rewards

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], url: str, seconds: float, **environment: str) -> Iterator[str]:
    """``command`` in a new process group, as soon as ``url`` answers; ended afterwards."""
    process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
    try:
        deadline = time.monotonic() + seconds
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "the service did not come up"
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", timeout=5)
                break
            time.sleep(0.1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def service(*arguments: str, port: int | None = None, **environment: str):
    """A service in this environment; yields its URL."""
    port = port or free_port()
    paths = os.pathsep.join(map(str, (ROOT, ROOT.parent / "PaCo-Reward" / "judge", ROOT / "tests")))
    command = [sys.executable, "-m", "paco_grpo.rewards.remote.service", *arguments, "--port", str(port)]
    return running(command, f"http://127.0.0.1:{port}", 120, PYTHONPATH=paths, **environment)


def remote(name: str, url: str, **kwargs):
    """The reward ``name`` at ``url``, as a configuration builds it."""
    return build_rewards({name: 1.0}, {name: {"server": url, "deadline_s": 20.0} | kwargs})[name.rpartition(":")[2]]
