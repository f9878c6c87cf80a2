"""setup.sh: choice of Python, messages when something is missing, and pins that name no host."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PINS = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(path: Path) -> dict[str, str]:
    return {normalized(name): version for name, version in (line.split("==") for line in path.read_text().split())}


@pytest.fixture
def clone(tmp_path):
    """A clone without environments: only what setup.sh itself needs."""
    shutil.copytree(REPO / "constraints", tmp_path / "constraints")
    folders = ("PaCo-GRPO", "PaCo-Reward/judge", "PaCo-Reward/LLaMA-Factory", "quickstart")
    for name in ("setup.sh", *(f"{folder}/pyproject.toml" for folder in folders), "PaCo-Reward/LLaMA-Factory/setup.py",
                 "PaCo-Reward/evaluation/requirements.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    return tmp_path


def setup(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, "PYTHON": sys.executable, **env}
    command = ["bash", clone / "setup.sh", *arguments]
    return subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_other_pythons_are_refused_by_version(clone):
    path = clone / "fakepython"
    path.write_text("#!/bin/sh\necho 3.13\n")
    path.chmod(0o755)
    done = setup(clone, PYTHON=str(path))
    assert done.returncode == 1 and "3.11 or 3.12" in done.stderr and "3.13" in done.stderr


@pytest.mark.parametrize("tag", ["py311", "py312"])
def test_pins_are_names_and_versions_only_and_complete(tag):
    requirements = (REPO / "constraints/requirements.in").read_text().splitlines()
    wanted = {normalized(re.split(r"[=<>\[ ]", line)[0]) for line in requirements if line and line[0] != "#"}
    assert wanted <= set(read_pins(REPO / f"constraints/{tag}.txt"))
    for name in (tag, f"vllm-{tag}"):
        lines = (REPO / f"constraints/{name}.txt").read_text().splitlines()
        assert len(lines) > 100 and [line for line in lines if not PINS.fullmatch(line)] == []
