"""The servers of each launch: the note of what runs, whether it answers, and how it ends.

    python -m vllm_server.servers status
        exit status 0 when all are healthy, else 3
    python -m vllm_server.servers stop
        ends the servers of VLLM_LABEL and no other process; may be repeated

A state is healthy, loading or stuck, other key (VLLM_API_KEY is not the one of the launch), or
ended.
"""

import argparse
import contextlib
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
from pydantic import TypeAdapter

from paco_judge.errors import UserError, run_command
from paco_judge.files import write_atomically

GATEWAY = "gateway"  # engine of the gateway's record
_STATE = "state.json"  # of a label
_CLOCK_S = 2.0  # psutil's start times move by less when the system's clock is corrected
_LINE = "{label:<16} {name:<24} {engine:<12} {url:<28} {pid:>8}  {state}  {log}"


@dataclass
class Server:
    """A server and its processes, which are a process group of its own."""

    name: str
    url: str
    engine: str
    names: list[str]  # everything it serves
    gpus: list[str]
    command: list[str]
    log: str = ""
    pid: int = 0
    started: float = 0.0  # seconds since the epoch

    def members(self) -> list[int]:
        """Its processes that run: the first one, and children, which may outlive it."""
        if self._pid_was_reused():
            return []
        members = []
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(ProcessLookupError):
                # A zombie has ended; in containers without an init process it stays.
                runs = process.info["status"] != psutil.STATUS_ZOMBIE
                if runs and os.getpgid(process.pid) == self.pid:
                    members.append(process.pid)
        return members

    def _pid_was_reused(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > _CLOCK_S
        except psutil.NoSuchProcess:
            return False

    def state(self, api_key: str | None) -> str:
        """``healthy``, ``other key``, ``loading or stuck``, or ``ended``.

        A healthy server lists its names. ``other key``: it does not accept the key of the launch.
        """
        if self.pid not in self.members():
            return "ended"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        served = set()
        # trust_env: no proxy for this machine's servers
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            answer = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=5, trust_env=False)
            if answer.status_code in (401, 403):
                return "other key"
            served = {row["id"] for row in answer.json()["data"]}
        return "healthy" if set(self.names) <= served else "loading or stuck"

    def end(self, grace_period_s: float) -> bool:
        """End its processes; whether there were any.

        Raises:
            UserError: They do not end, even when killed.
        """
        was_running = bool(self.members())
        for number, seconds in ((signal.SIGTERM, grace_period_s), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + seconds
            if self.members():
                os.killpg(self.pid, number)
            while self.members() and time.monotonic() < deadline:
                time.sleep(0.05)
        if remaining := self.members():
            raise UserError(f"processes {remaining} of {self.name} do not end, even when killed")
        return was_running


_SERVERS = TypeAdapter(list[Server])


def read_servers(folder: Path) -> list[Server]:
    """The servers of a label; none if nothing was launched."""
    file = folder / _STATE
    return _SERVERS.validate_json(file.read_bytes()) if file.exists() else []


def write_servers(folder: Path, servers: list[Server]) -> None:
    """Replace the note of a label."""
    write_atomically(folder / _STATE, _SERVERS.dump_json(servers, indent=1))


def end_servers(
    folder: Path, servers: Sequence[Server], grace_period_s: float = 20.0
) -> list[Server]:
    """End servers with all their children, and return those that were running; their logs stay.

    The gateway is first, so that it can answer its requests. Raises UserError.

    Args:
        grace_period_s: For each server to end by itself.
    """
    ended = [server for server in servers if server.end(grace_period_s)]
    (folder / _STATE).unlink(missing_ok=True)
    return ended


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, or a folder of this machine in the user's home, which machines may share.

    That is paco-rl/HOST under XDG_STATE_HOME or ~/.local/state.
    """
    state_home = Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    default = state_home / "paco-rl" / platform.node()
    root = Path(environment.get("PACO_RUNTIME_DIR") or default).absolute()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def label_folder(environment: Mapping[str, str]) -> Path:
    """The folder of VLLM_LABEL, for its note and its logs."""
    return runtime_root(environment) / (environment.get("VLLM_LABEL") or "default")


def all_servers(root: Path) -> dict[str, list[Server]]:
    """The servers of each label."""
    files = sorted(root.glob(f"*/{_STATE}"))
    return {file.parent.name: read_servers(file.parent) for file in files}


def status() -> int:
    """Print a row for each server; returns the exit status."""
    rows = []
    for label, servers in all_servers(runtime_root(os.environ)).items():
        for server in servers:
            state = server.state(os.environ.get("VLLM_API_KEY"))
            rows.append({"label": label, "state": state} | asdict(server))
            print(_LINE.format(**rows[-1]))
    if not rows:
        print("No servers.")
    return 0 if all(row["state"] == "healthy" for row in rows) else 3


def stop() -> None:
    """End the servers of one label."""
    folder = label_folder(os.environ)
    servers = read_servers(folder)
    ended = end_servers(folder, servers)
    for server in servers:
        result = "ended" if server in ended else "was not running"
        print(f"{server.name} at {server.url}: {result}")
    if not servers:
        print(f"No servers of {folder.name!r}.")


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["status", "stop"])
    command = stop if parser.parse_args().command == "stop" else status
    return run_command(command, OSError)


if __name__ == "__main__":
    sys.exit(main())
