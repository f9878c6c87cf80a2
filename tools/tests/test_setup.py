"""setup.sh: choice of Python, messages when something is missing, and pins that name no host."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
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


@pytest.mark.parametrize("version", ["3.10", "3.13", "none"])
def test_other_pythons_are_refused_by_version(clone, version):
    path = clone / "fakepython"
    if version != "none":
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    done = setup(clone, PYTHON=str(path))
    assert done.returncode == 1 and "3.11 or 3.12" in done.stderr and "PYTHON=" in done.stderr
    assert version == "none" or version in done.stderr


def test_unreachable_registry_names_the_remedies(clone):
    dead = "http://127.0.0.1:9/simple"
    done = setup(clone, UV_DEFAULT_INDEX=dead, PIP_INDEX_URL=dead, PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="", PIP_RETRIES="0",
                 PIP_CONFIG_FILE=os.devnull, UV_HTTP_RETRIES="0", UV_OFFLINE="0", UV_CACHE_DIR=str(clone / "cache"))  # fmt: skip
    assert done.returncode == 1 and "HTTPS_PROXY" in done.stderr
    assert not (clone / ".venv/.paco-stamp").exists()


@pytest.mark.parametrize("tag", ["py311", "py312"])
def test_pins_are_names_and_versions_only_and_complete(tag):
    requirements = (REPO / "constraints/requirements.in").read_text().splitlines()
    wanted = {normalized(re.split(r"[=<>\[ ]", line)[0]) for line in requirements if line and line[0] != "#"}
    assert wanted <= set(read_pins(REPO / f"constraints/{tag}.txt"))
    for name in (tag, f"vllm-{tag}"):
        lines = (REPO / f"constraints/{name}.txt").read_text().splitlines()
        assert len(lines) > 100 and [line for line in lines if not PINS.fullmatch(line)] == []


def test_this_environment_agrees_with_the_pins():
    """The tests run on what setup.sh installs, not on something newer that happens to be there."""
    if not Path(sys.executable).is_relative_to(REPO):
        return  # a developer's own environment
    pinned = read_pins(REPO / f"constraints/py3{sys.version_info[1]}.txt")
    # Not of sys.path: setuptools adds its own copies of some packages to it.
    site = [sysconfig.get_path("purelib")]
    have = {normalized(found.metadata["Name"]): found.version for found in importlib.metadata.distributions(path=site)}
    assert {n: v for n, v in have.items() if n in pinned and v.split("+")[0] != pinned[n]} == {}
