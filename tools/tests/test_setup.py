"""setup.sh, and the scripts' choice of Python."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def test_other_pythons_are_refused_by_version(tmp_path):
    shutil.copy(REPO / "setup.sh", tmp_path)
    other = tmp_path / "fakepython"
    other.write_text("#!/bin/sh\necho 3.13\n")
    other.chmod(0o755)
    done = subprocess.run(["bash", tmp_path / "setup.sh"], env=os.environ | {"PYTHON": str(other)}, capture_output=True, text=True,
                          timeout=120, stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    assert done.returncode == 1 and "3.11 or 3.12" in done.stderr and "3.13" in done.stderr


@pytest.fixture
def clone(tmp_path) -> Path:
    """A repository with a .venv and an environment next to it; both have the package ``ours``."""
    (tmp_path / "tools").mkdir()
    shutil.copy(REPO / "tools" / "python.sh", tmp_path / "tools")
    for name in (".venv", "active"):
        venv.create(tmp_path / name, symlinks=True)
        (site,) = (tmp_path / name).glob("lib/python3*/site-packages")
        (site / "ours.py").touch()
    return tmp_path


def chosen(clone: Path, *modules: str, **variables: str) -> subprocess.CompletedProcess:
    code = 'set -euo pipefail; source "$0/tools/python.sh"; choose_python "$@"; echo "$PYTHON"'
    variables = {"PATH": "/usr/bin:/bin"} | variables
    command = ["bash", "-c", code, str(clone), *modules]
    return subprocess.run(
        command, cwd=clone, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_activated_environment_comes_before_the_repositorys(clone, variable):
    active = {variable: str(clone / "active"), "PATH": f"{clone}/active/bin:/usr/bin:/bin"}
    assert chosen(clone, "ours", **active).stdout == f"{clone}/active/bin/python\n"
    assert chosen(clone, "ours").stdout == f"{clone}/.venv/bin/python\n"
    assert (
        chosen(clone, "ours", PYTHON=f"{clone}/.venv/bin/python", **active).stdout
        == f"{clone}/.venv/bin/python\n"
    )


def test_an_environment_without_the_package_is_passed_over_and_named(clone):
    (clone / "theirs").mkdir()  # a folder in the working folder is no package
    active = {"VIRTUAL_ENV": str(clone / "active"), "PATH": f"{clone}/active/bin:/usr/bin:/bin"}
    next((clone / "active").glob("lib/python3*/site-packages/ours.py")).unlink()
    found = chosen(clone, "ours", **active)
    assert (
        found.stdout == f"{clone}/.venv/bin/python\n"
        and f"{clone}/active/bin/python" in found.stderr
    )
    for variables in (active, {"PYTHON": f"{clone}/.venv/bin/python"}):
        missing = chosen(clone, "theirs", **variables)
        assert (
            missing.returncode == 2 and "theirs" in missing.stderr and "setup.sh" in missing.stderr
        )
