import sys
from pathlib import Path

from hypothesis import settings

REPO = Path(__file__).resolve().parents[3]
sys.path[:0] = [
    str(REPO / part / "tests") for part in ("PaCo-Reward", "PaCo-GRPO")
]  # tiny judges, and a judge on loopback
# Machines that run tests are shared: time limits belong to pytest, not to single examples.
settings.register_profile("judge", deadline=None)
settings.load_profile("judge")
