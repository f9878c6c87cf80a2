"""Each subproject installs alone in an empty environment, by the command of its published guide, and then works.

`pip install` is `uv pip install` here: the same arguments and build backends, from the wheels that setup.sh fetched.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TAG = f"py{sys.version_info[0]}{sys.version_info[1]}"
pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(1500)]


def run(command: list, cwd: Path) -> str:
    """The command's output; its end is shown where it fails."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=clean, check=False, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture
def place(tmp_path):
    """(a copy of the files that git knows, the interpreter of an empty environment with pip, setuptools and wheel, `pip install`).

    That is what `conda create` and `python -m venv` of Python 3.11 give. The copy shows that nothing untracked is needed,
    and keeps build leftovers out of the repository. Both are removed afterwards: an environment takes gigabytes.
    """
    copy = tmp_path / "clone"
    run(["git", "clone", "-q", "--depth", "1", f"file://{REPO}", copy], tmp_path)
    uv = shutil.which("uv") or Path(sys.executable).with_name("uv")
    run([uv, "venv", "-q", "--seed", "--python", sys.executable, tmp_path / "env"], tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    def pip(arguments: list[str], folder: Path) -> None:
        # The guide's command with today's newest packages would be another test every day: the tested versions are asked for.
        constraint = REPO / "constraints" / f"{TAG}.txt"
        run([uv, "pip", "install", "-q", "--python", python, "-c", constraint, "-b", constraint, *arguments], folder)

    pip(["setuptools", "wheel"], tmp_path)
    yield copy, python, pip
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_paco_reward(place):
    copy, python, pip = place
    folder = copy / "PaCo-Reward" / "LLaMA-Factory"
    pip(["-e", ".[torch,metrics]", "--no-build-isolation"], folder)
    run([python, "-m", "pip", "check"], folder)
    assert "0." in run([python.with_name("paco-reward"), "--version"], copy)
    run([python, "-c", "import paco_judge.client, paco_reward.overlay, scipy, torchvision"], copy)


def test_paco_grpo(place):
    copy, python, pip = place
    pip(["-e", "PaCo-GRPO"], copy)
    run([python, "-m", "pip", "check"], copy)
    folder = copy / "PaCo-GRPO"
    run([python, "-c", "import paco_judge.client, paco_grpo.training.trainer, paco_grpo.policies.flux"], folder)
    done = subprocess.run([python, "scripts/train.py", "--config", "config/grpo.py:t2iss"], cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "Did you mean 't2is'" in done.stderr
