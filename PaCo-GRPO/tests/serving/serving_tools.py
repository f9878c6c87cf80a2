"""Running launch.sh, stop.sh and status.sh in tests, with a fake vLLM where that is enough."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from fakes import free_port

from paco_judge.client import Pair
from paco_judge.images import data_url
from paco_judge.questions import build_messages
from vllm_server.servers import all_servers

ROOT = Path(__file__).resolve().parents[2]
REPO = ROOT.parent
VLLM_PYTHON = REPO / ".venv-vllm" / "bin" / "python"
PYTHON = '#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec {python} "$@"\n'


def option(words: list[str], name: str) -> str:
    """The value of an option on a command line."""
    return words[words.index(name) + 1]


def body(pair: Pair, **fields) -> dict:
    """The request of a question about two images."""
    messages = build_messages([*map(data_url, pair.images)], pair.question)
    scoring = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    return {"model": "Judge", "messages": messages} | scoring | fields


def top_logprobs(answer: httpx.Response) -> list[dict]:
    """The alternatives to the first token of an answer."""
    return answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]


class Shell:
    """Runs our scripts with their own environment and working folder."""

    def __init__(self, folder: Path) -> None:
        self.vllm = folder / "vllm-environment"  # our packages, and a fake vLLM
        package = self.vllm / "site" / "vllm" / "entrypoints" / "cli"
        package.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("fake_vllm_server.py"), package / "main.py")
        python = self.vllm / "bin" / "python"
        python.parent.mkdir()
        python.write_text(PYTHON.format(site=self.vllm / "site", python=sys.executable))
        python.chmod(0o755)
        self.cwd = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder / "run" / "test"  # of the launch's label
        self.environment = {
            "HOME": os.environ.get("HOME", "/"),
            "PATH": os.environ["PATH"],
            "PYTHON": sys.executable,
            "VLLM_PYTHON": str(self.vllm / "bin" / "python"),
            "VLLM_MODEL_PATHS": "model",
            "VLLM_MODEL_NAMES": "Judge",
            "VLLM_PORT": str(self.port),
            "VLLM_LABEL": "test",
            "PACO_RUNTIME_DIR": str(folder / "run"),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(ROOT / "vllm_server" / script), *arguments],
            env=self.environment | variables,
            cwd=self.cwd,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        """Exit status, output, errors."""
        process = self.start(script, *arguments, **variables)
        output, errors = process.communicate()
        return process.returncode, output, errors

    def launch(self, **variables: str) -> str:
        """A launch that succeeds; its output."""
        status, output, errors = self.run("launch.sh", **variables)
        assert status == 0, errors
        return output

    def failed_launch(self, **variables: str) -> str:
        """A launch that fails; its errors."""
        status, _, errors = self.run("launch.sh", **variables)
        assert status == 1
        assert "Traceback" not in errors
        return errors

    def processes(self, running: bool) -> set[int]:
        """The servers' processes, once some run, or none; they work in the folders of labels."""
        deadline = time.monotonic() + 60
        while True:
            pids = set()
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    is_server = Path(process.cwd()).is_relative_to(self.folder.parent)
                    if is_server and process.status() != psutil.STATUS_ZOMBIE:  # it has ended
                        pids.add(process.pid)
            if bool(pids) == running:
                return pids
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)

    def states(self, api_key: str | None = None) -> list[tuple[str, str, str]]:
        """Label, name and state of each server."""
        states = []
        for label, servers in all_servers(self.folder.parent).items():
            states += [(label, server.name, server.state(api_key)) for server in servers]
        return states
