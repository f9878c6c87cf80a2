"""The judge over HTTP, started and ended by the commands that a user with GPUs types."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paco_toy.console import Console
from paco_toy.processes import Commands, QuickstartError

PORT = 8000


@dataclass(frozen=True)
class JudgeServer:
    """PaCo-GRPO/vllm_server/launch.sh and stop.sh for one judge.

    Attributes:
        grpo: PaCo-GRPO of this clone. Another clone's drivers have other servers.
        judge: Its merged weights.
        name: That requests ask for.
        log: Prefix of its logs' names.
    """

    commands: Commands
    console: Console
    grpo: Path
    judge: Path
    name: str
    log: str

    @property
    def label(self) -> str:
        """Of this clone's servers."""
        return f"paco-quickstart-{hashlib.sha256(str(self.grpo).encode()).hexdigest()[:8]}"

    def start(self) -> dict[str, Any]:
        """Its ``engine`` and ``port``, once it answers.

        Raises:
            QuickstartError: It did not start.
        """
        self.stop()  # one of a driver that was killed
        wanted = int(os.environ.get("PACO_QUICKSTART_PORT", PORT))
        port = free_port(wanted)
        if port != wanted:
            self.console.line(f"another program listens on port {wanted}; the judge is served on {port}")
        env = {"VLLM_MODEL_PATHS": str(self.judge), "VLLM_MODEL_NAMES": self.name, "VLLM_PORT": str(port), "VLLM_LABEL": self.label}
        env |= cpu_engine()
        # The trainer's processes sleep while the judge scores an epoch's images, so it may use both cores.
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(min(2, len(os.sched_getaffinity(0)))))
        started = time.monotonic()
        output = self.commands.run(["bash", "vllm_server/launch.sh"], self.grpo, f"{self.log}-launch", "loading the judge", env=env)
        named = re.search(r"(?i)engine\W+(vllm|transformers)", output)
        if not named:
            raise QuickstartError(f"launch.sh did not report its engine; see {self.commands.logs / f'{self.log}-launch.log'}")
        engine = named[1].lower()
        self.console.line(f"{self.name} on 127.0.0.1:{port}, engine {engine}, ready after {time.monotonic() - started:.0f} s")
        return {"engine": engine, "port": port}

    def stop(self) -> None:
        """Ends our server, if there is one: without one stop.sh does nothing."""
        command = ["bash", "vllm_server/stop.sh"]
        self.commands.run(command, self.grpo, f"{self.log}-stop", "stopping the server", env={"VLLM_LABEL": self.label})


def cpu_engine() -> dict[str, str]:
    """The engine that serves the judge on a CPU, where vLLM takes three times as long for models this small."""
    return {} if "VLLM_ENGINE" in os.environ or shutil.which("nvidia-smi") else {"VLLM_ENGINE": "transformers"}


def free_port(wanted: int) -> int:
    """``wanted`` if no program listens there, else a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
