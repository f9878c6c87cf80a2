"""Running launch.sh, stop.sh and status.sh in tests, with a fake vLLM where that is enough."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import psutil
from fakes import free_port

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_vllm_server.py")
REPO = ROOT.parent
WITH_VLLM = (  # what the launcher imports, or asks for, of the packages that come with vLLM
    *(
        "psutil",
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions",
        "typing_inspection",
        "fastapi",
    ),
    *("uvicorn", "httpx", "httpcore", "h11", "anyio", "idna", "certifi", "sniffio"),
)
VLLM_PYTHON = REPO / ".venv-vllm" / "bin" / "python"


def option(words: list[str], name: str) -> str:
    """The value of an option on a command line."""
    return words[words.index(name) + 1]


class Shell:
    """Runs our scripts with their own environment and working folder."""

    def __init__(self, tmp_path: Path):
        self.vllm = tmp_path / "vllm-environment"  # with nothing but a fake vLLM
        venv.create(self.vllm, symlinks=True)
        (site,) = self.vllm.glob("lib/python3*/site-packages")
        package = site / "vllm" / "entrypoints" / "cli"
        package.mkdir(parents=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        shutil.copy(FAKE, package / "main.py")
        for name in WITH_VLLM:
            file = Path(importlib.util.find_spec(name).origin)
            module = file.parent if file.stem == "__init__" else file
            (site / module.name).symlink_to(module)
        self.cwd, self.port = tmp_path, free_port()
        self.environment = {
            "HOME": os.environ.get("HOME", "/"),
            "PATH": os.environ["PATH"],
            "PYTHON": sys.executable,
            "VLLM_PYTHON": str(self.vllm / "bin" / "python"),
            "VLLM_MODEL_PATHS": "model",
            "VLLM_MODEL_NAMES": "Judge",
            "VLLM_PORT": str(self.port),
            "VLLM_LABEL": "test",
            "PACO_RUNTIME_DIR": str(tmp_path / "run"),
            "CUDA_VISIBLE_DEVICES": "",
            "FAKE_VLLM_RECORD": str(tmp_path / "records"),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """Of the launch's label."""
        return Path(self.environment["PACO_RUNTIME_DIR"]) / "test"

    def start(self, script: str, *arguments, **variables) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(ROOT / "vllm_server" / script), *arguments],
            env={**self.environment, **variables},
            cwd=self.cwd,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(
        self, script: str, *arguments, timeout: float = 300, **variables
    ) -> tuple[int, str, str]:
        process = self.start(script, *arguments, **variables)
        output, errors = process.communicate(timeout=timeout)
        return process.returncode, output, errors

    def launch(self, timeout: float = 300, **variables) -> str:
        """A launch that succeeds; its output."""
        status, output, errors = self.run("launch.sh", timeout=timeout, **variables)
        assert status == 0, errors
        return output

    def failed_launch(self, **variables) -> str:
        """A launch that fails; its errors."""
        status, _, errors = self.run("launch.sh", **variables)
        assert status == 1 and "Traceback" not in errors
        return errors

    def stop(self, **variables) -> None:
        status, _, errors = self.run("stop.sh", **variables)
        assert status == 0, errors

    def records(self, count: int = 1) -> list[dict]:
        """What ``count`` fake vLLMs were started with, in the order of their ports."""
        folder = Path(self.environment["FAKE_VLLM_RECORD"])
        wait_for(lambda: len(list(folder.glob("*.json"))) >= count)
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def fake_pids(self, count: int = 1) -> list[int]:
        """The processes of ``count`` fake vLLMs: each server and its child."""
        return [pid for record in self.records(count) for pid in record["pids"]]

    def status(self, **variables) -> list[dict]:
        return json.loads(self.run("status.sh", "--json", **variables)[1])


def all_ended(pids: list[int]) -> None:
    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    wait_for(lambda: not any(map(running, pids)), 10)


def wait_for(condition, timeout_s: float = 60.0):
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return result
