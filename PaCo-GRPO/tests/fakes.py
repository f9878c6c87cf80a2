"""A judge on loopback whose answers a test decides (shared with paco-judge's tests), and free
ports.
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
