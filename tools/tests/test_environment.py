"""setup.sh: choice of Python, messages when something is missing, and pins that name no host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import environment
import installer

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """An empty clone: only what setup.sh itself needs."""
    for name in ("setup.sh", "tools/environment.py", "tools/installer.py", environment.REQUIREMENTS):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((REPO / name).read_text())
    for pins in (REPO / "constraints").glob("*.txt"):
        (tmp_path / "constraints" / pins.name).write_text(pins.read_text())
    for number, folder in enumerate(environment.EDITABLE):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(f"[project]\nname='x{number}'\nversion='0'\n")
    monkeypatch.setattr(installer, "REPO", tmp_path)
    monkeypatch.setattr(environment, "REPO", tmp_path)
    return tmp_path


def setup(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, "PYTHON": sys.executable, **env}
    return subprocess.run(["bash", clone / "setup.sh", *arguments], env=variables, check=False,
                          capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize("version", ["3.10", "3.13", "none"])
def test_other_pythons_are_refused_by_version(clone, version):
    path = clone / "fakepython"
    if version != "none":
        path.write_text(f"#!/bin/sh\necho {version}\n")
        path.chmod(0o755)
    done = setup(clone, PYTHON=str(path))
    assert done.returncode == 1
    assert "3.11 or 3.12" in done.stderr and f"{version})." in done.stderr and "PYTHON=" in done.stderr


def test_check_changes_nothing_and_names_what_is_missing(clone):
    before = sorted(clone.rglob("*"))
    done = setup(clone, "--check", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1
    assert "missing  .venv: bash setup.sh" in done.stdout and "missing  .venv-vllm: bash setup.sh --vllm" in done.stdout
    assert sorted(clone.rglob("*")) == before


def test_an_incomplete_clone_is_named(clone):
    (clone / "PaCo-GRPO/pyproject.toml").unlink()
    done = setup(clone)
    assert done.returncode == 1 and "incomplete: PaCo-GRPO" in done.stderr


def test_unreachable_registry_is_one_clear_message(clone):
    """A registry nobody listens at: the message names the network and the remedies."""
    dead = "http://127.0.0.1:9/simple"
    done = setup(clone, UV_DEFAULT_INDEX=dead, PIP_INDEX_URL=dead, PIP_EXTRA_INDEX_URL="", PIP_FIND_LINKS="", PIP_RETRIES="0",
                 PIP_CONFIG_FILE=os.devnull, UV_HTTP_RETRIES="0", UV_OFFLINE="0", UV_CACHE_DIR=str(clone / "cache"))
    assert done.returncode == 1
    assert "UV_DEFAULT_INDEX" in done.stderr
    assert "Traceback" not in done.stderr


def test_stamp_follows_pins_and_packages(clone, monkeypatch):
    env = clone / ".venv"
    (env / "bin").mkdir(parents=True)
    (env / "bin/python").symlink_to(sys.executable)
    assert not environment.is_current(env, "train")
    environment.finish(env, "train", "test", 0.0)
    assert environment.is_current(env, "train")
    key = environment.key_of("train")
    for name in ("PaCo-GRPO/pyproject.toml", f"constraints/{installer.python_tag()}.txt"):
        with open(clone / name, "a") as file:
            file.write("# changed\n")
        assert environment.key_of("train") != key
        key = environment.key_of("train")
    monkeypatch.setenv("PACO_TORCH_BACKEND", "cu128")
    assert environment.key_of("train") != key
    (env / environment.STAMP).write_text("not json")
    assert not environment.is_current(env, "train")


def test_too_little_disk_is_refused_before_anything_is_made(clone, monkeypatch):
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: type("U", (), {"free": int(1e9)})())
    with pytest.raises(installer.SetupError, match=r"0\.9 GB.*3\.5 GB"):
        environment.make_training(clone / ".venv")
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(("output", "remedy"), [
    ("error: No space left on device (os error 28)", "disk"),
    ("error sending request for url\n dns error", "UV_DEFAULT_INDEX"),
    ("error: operation timed out", "UV_DEFAULT_INDEX"),
    ("x No solution found when resolving dependencies", "pinned version"),
    ("error: something else", "Output of the installer"),
])
def test_failures_are_explained(output, remedy):
    text = installer.explain("installing", output)
    assert remedy in text and output.splitlines()[-1] in text


def test_pip_without_ensurepip_installs_uv_into_the_environment(clone, monkeypatch):
    """Debian without python3-venv: `venv` fails, `venv --without-pip` works, the system's pip has to help."""
    calls = []

    def run(command, **_):
        calls.append([str(x) for x in command])
        without_ensurepip = calls[-1][1:3] == ["-m", "venv"] and "--without-pip" not in calls[-1]
        no_pip_inside = calls[-1][0].startswith(str(clone)) and "import pip" in calls[-1]
        return subprocess.CompletedProcess(command, int(without_ensurepip or no_pip_inside), "", "")

    monkeypatch.setattr(installer, "run", run)
    installer.bootstrap("/usr/bin/python3", clone / ".venv")
    python = str(clone / ".venv/bin/python")
    assert calls[-1][:6] == ["/usr/bin/python3", "-m", "pip", "--python", python, "install"]
    assert calls[-1][-1].startswith("uv==")


def test_neither_ensurepip_nor_pip_names_the_package(clone, monkeypatch):
    fails = lambda command, **_: subprocess.CompletedProcess(command, int("--without-pip" not in command), "", "")
    monkeypatch.setattr(installer, "run", fails)
    with pytest.raises(installer.SetupError, match="apt-get install python3-venv"):
        installer.bootstrap("/usr/bin/python3", clone / ".venv")


def test_cpu_builds_only_where_they_are_reached(monkeypatch, tmp_path):
    answer, asked = 0, []
    monkeypatch.delenv("PACO_TORCH_BACKEND", raising=False)
    monkeypatch.setattr(installer, "has_gpu", lambda: False)

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, answer, "", "")

    monkeypatch.setattr(installer, "run", run)
    assert installer.torch_backend("uv", tmp_path) == ["--torch-backend", "cpu"]
    assert "--reinstall" in asked[0]  # an environment that has torch already answers for nobody
    answer = 1
    assert installer.torch_backend("uv", tmp_path) == []
    monkeypatch.setenv("PACO_TORCH_BACKEND", "cu128")
    assert installer.torch_backend("uv", tmp_path) == ["--torch-backend", "cu128"]
    monkeypatch.setenv("PACO_TORCH_BACKEND", "default")
    assert installer.torch_backend("uv", tmp_path) == []


@pytest.mark.parametrize("tag", ["py311", "py312"])
def test_pins_are_names_and_versions_only_and_complete(tag):
    wanted = {re.split(r"[=<>\[ ]", line)[0].replace("_", "-").lower()
              for line in (REPO / environment.REQUIREMENTS).read_text().splitlines() if line and line[0] != "#"}
    assert wanted <= set(installer.read_pins(installer.pins("train", tag)))
    for kind in ("train", "vllm"):
        lines = installer.pins(kind, tag).read_text().splitlines()
        assert len(lines) > 100
        assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+", line)] == []


def test_this_environment_agrees_with_the_pins():
    """The tests run on what setup.sh installs, not on something newer that happens to be there."""
    if not Path(sys.executable).is_relative_to(REPO):
        return  # a developer's own environment
    pinned, have = installer.read_pins(installer.pins("train")), environment.installed_versions(REPO / ".venv")
    assert {n: v for n, v in have.items() if n in pinned and v.split("+")[0] != pinned[n]} == {}


def test_an_installer_that_hangs_is_ended_with_a_message(tmp_path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho Resolving; exec sleep 600\n")
    uv.chmod(0o755)
    monkeypatch.setattr(installer, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(installer, "SILENT_SECONDS", 1)
    with pytest.raises(installer.SetupError, match="installing it was ended: no output for 1 s") as error:
        installer.install(str(uv), tmp_path, [], "installing it")
    assert "| Resolving" in str(error.value)
    with pytest.raises(installer.SetupError, match="was ended"):
        installer.run_quiet([str(uv)], "installing uv")
