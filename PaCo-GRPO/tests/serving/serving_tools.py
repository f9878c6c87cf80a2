"""Running launch.sh, stop.sh and status.sh in tests, with a stand-in for vLLM where that is enough."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from vllm_server.processes import Process

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_vllm_server.py")
REPO = ROOT.parent
VLLM_PYTHON = REPO / ".venv-vllm" / "bin" / "python"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Shell:
    """Runs our scripts with an environment of its own, from a folder of its own."""

    def __init__(self, tmp_path: Path, **variables):
        package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        shutil.copy(FAKE, package / "api_server.py")
        self.python = tmp_path / "vllm-python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "fake"}" exec "{sys.executable}" "$@"\n')
        self.python.chmod(0o755)
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        self.cwd = tmp_path
        self.port = free_port()
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        kept["PATH"] = f"{self.bin}:{kept['PATH']}"
        self.environment = kept | {
            "PYTHON": sys.executable,
            "VLLM_PYTHON": str(self.python),
            "VLLM_MODEL_PATHS": "model",
            "VLLM_MODEL_NAMES": "Judge",
            "VLLM_PORT": str(self.port),
            "VLLM_LABEL": "test",
            "PACO_RUNTIME_DIR": str(tmp_path / "run"),
            "CUDA_VISIBLE_DEVICES": "",
            "FAKE_VLLM_RECORD": str(tmp_path / "records"),
            **variables,
        }

    def install_gpus(self, count: int) -> None:
        """An nvidia-smi that lists so many GPUs."""
        lines = "".join(f"echo 'GPU {i}: NVIDIA H200 (UUID: GPU-{i}0000000-aaaa)'\n" for i in range(count))
        (self.bin / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
        (self.bin / "nvidia-smi").chmod(0o755)

    def start(self, script: str, *arguments, **variables) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(ROOT / "vllm_server" / script), *arguments],
            env={**self.environment, **variables}, cwd=self.cwd, start_new_session=True,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, script: str, *arguments, timeout: float = 300, **variables) -> tuple[int, str, str]:
        process = self.start(script, *arguments, **variables)
        output, errors = process.communicate(timeout=timeout)
        return process.returncode, output, errors

    def records(self, count: int = 1) -> list[dict]:
        """What ``count`` stand-ins for vLLM were started with, in the order of their ports."""
        folder = Path(self.environment["FAKE_VLLM_RECORD"])
        wait_for(lambda: len(list(folder.glob("*.json"))) >= count)
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def record(self) -> dict:
        return self.records()[0]

    def status(self) -> list[dict]:
        return json.loads(self.run("status.sh", "--json")[1])


def all_ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(Process.of(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for(condition, timeout_s: float = 60.0):
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return result
