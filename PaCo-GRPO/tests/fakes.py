"""A judge on loopback whose answers a test decides (shared with paco-judge's tests); several
processes.
"""

import importlib.util
import socket
from pathlib import Path

_PATH = Path(__file__).resolve().parents[2] / "PaCo-Reward" / "judge" / "tests" / "fake_judge.py"
_spec = importlib.util.spec_from_file_location("fake_judge", _PATH)
fake_judge = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_judge)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def distributed_environment(rank: int, processes: int, port: int, machines: int = 1) -> dict:
    """Of one of several processes on this machine, or on several that it stands for."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes // machines),
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
    }
