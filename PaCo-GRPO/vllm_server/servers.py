"""A launch's processes: started, waited for until they answer, and ended."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from vllm_server.processes import Process, end_processes, exit_status
from vllm_server.settings import LaunchError
from vllm_server.state import GATEWAY, ServerRecord

_POLL_S, _PROGRESS_S, _QUIET_S, _LOG_LINES = 0.25, 3.0, 20.0, 40


@dataclass
class Started:
    """A process that this launch started. ``names``: what it must serve before it is ready."""

    child: subprocess.Popen
    record: ServerRecord
    names: tuple[str, ...]
    timeout_s: float
    ready: bool = False

    @property
    def log(self) -> Path | None:
        return Path(self.record.log) if self.record.log else None


def start(command: Sequence[str], environment: dict[str, str], folder: Path, log: Path | None) -> tuple:
    """Start a process in a session of its own: (Popen, Process). ``log`` None: it writes where we write.

    Raises LaunchError.
    """
    # A log's descriptor is the server's; ours is closed once it has been passed on.
    output = os.dup(sys.stdout.fileno()) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # survives the shell, and can be ended as a whole
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error}") from error
    finally:
        os.close(output)
    leader = Process.of(child.pid)
    if leader is None:
        child.wait()
        raise LaunchError(f"{Path(command[0]).name} ended at once.\n{_end_of(log)}")
    return child, leader


def wait_until_ready(started: Sequence[Started], api_key: str | None) -> None:
    """Until every process serves its names. Raises LaunchError for one that ended or is over its time."""
    begun = time.monotonic()
    said = {one.record.title: (begun, "") for one in started}
    while not all(one.ready for one in started):
        for one in started:
            status = exit_status(one.child.pid)
            if status is not None:
                doing = "after it was up" if one.ready else "while loading"
                raise LaunchError(
                    f"the server of {one.record.title} ended with status {status} {doing}.\n{_end_of(one.log)}"
                )
        for one in started:
            # The gateway answers for all; nothing more is asked of those that have answered.
            if not one.ready and serves(one.record.url, one.names, api_key):
                one.ready = True
                continue
            elapsed = time.monotonic() - begun
            if not one.ready and elapsed > one.timeout_s:
                raise LaunchError(
                    f"the server of {one.record.title} did not answer within {one.timeout_s:g} s "
                    f"(VLLM_START_TIMEOUT).\n{_end_of(one.log)}"
                )
            if not one.ready and one.record.engine != "gateway":
                said[one.record.title] = _say_progress(one, elapsed, *said[one.record.title])
        time.sleep(_POLL_S)


def _say_progress(one: Started, elapsed: float, said: float, said_line: str) -> tuple[float, str]:
    now, line = time.monotonic(), _last_line(one.log)
    if now - said <= (_PROGRESS_S if line != said_line else _QUIET_S):
        return said, said_line
    print(f"  {one.record.title} loading, {elapsed:.0f} s: {line}", flush=True)
    return now, line


def serves(url: str, names: Sequence[str], api_key: str | None, timeout_s: float = 5.0) -> bool:
    """Whether a healthy server at ``url`` serves all ``names``."""
    address = urlsplit(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            return False
        connection.request("GET", "/v1/models", headers=headers)
        return set(names) <= {entry["id"] for entry in json.loads(connection.getresponse().read())["data"]}
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        connection.close()


def end_group(servers: list[ServerRecord]) -> list[Process]:
    """End a launch's processes: the gateway first, so that it can answer what it has in hand. Returns what still lives."""
    left = []
    for front in (True, False):
        part = [server for server in servers if (server.engine == GATEWAY) == front]
        members = [member for server in part for member in server.members]
        left += end_processes(members, [server.leader for server in part])
    return left


def _end_of(log: Path | None) -> str:
    if log is None:
        return "Its output is above."
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"End of its log ({log}):", *(f"  | {line}" for line in lines)])


def _last_line(log: Path | None) -> str:
    if log is None:
        return "…"
    with open(log, "rb") as handle:
        handle.seek(max(0, log.stat().st_size - 4000))
        lines = [
            line for line in handle.read().decode(errors="replace").replace("\r", "\n").split("\n") if line.strip()
        ]
    return lines[-1].strip()[:120] if lines else "…"
