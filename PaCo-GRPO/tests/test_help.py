"""``--help`` of the Python commands: at once, each option once, and nothing is imported that takes
seconds.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None  # importing it is an error
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "script",
    [
        "scripts/train.py",
        "scripts/evaluate.py",
        "scripts/generate.py",
        "scripts/estimate.py",
        "scripts/report.py",
        "paco_grpo/rewards/subfig_clipT.py",
    ],
)
def test_help_needs_no_torch(script):
    command = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(script).name in done.stdout
    options = re.findall(r"^ +(--\w[\w-]*)", done.stdout, flags=re.MULTILINE)
    assert len(options) == len(set(options))
