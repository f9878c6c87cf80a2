"""A judge on loopback whose answers a test decides (shared with paco-judge's tests)."""

import importlib.util
from pathlib import Path

_PATH = Path(__file__).resolve().parents[2] / "PaCo-Reward" / "judge" / "tests" / "fake_judge.py"
_spec = importlib.util.spec_from_file_location("fake_judge", _PATH)
fake_judge = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake_judge)
