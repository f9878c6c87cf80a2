"""Starting the processes of a launch, and waiting until they answer."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_server.plan import PlannedProcess
from vllm_server.processes import Process, exit_status, port_users
from vllm_server.settings import LaunchError
from vllm_server.state import GATEWAY

_POLL_S, _PROGRESS_S, _LOG_LINES = 0.25, 10.0, 40


def start(process: PlannedProcess, folder: Path, log: Path | None) -> None:
    """Starts a process in a session. ``log`` None: it shares our output. Raises LaunchError."""
    output = os.dup(sys.stdout.fileno()) if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        child = subprocess.Popen(
            process.command,
            env=process.environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it survives the shell, and can be ended with all its children
        )
    except OSError as error:
        raise LaunchError(f"cannot start {process.command[0]}: {error}") from error
    finally:
        os.close(output)
    leader = Process.of(child.pid)
    process.server = replace(process.server, leader=leader, log=str(log) if log else None)
    if leader is None:
        child.wait()
        raise LaunchError(f"{Path(process.command[0]).name} ended immediately.\n{_log_tail(process)}")
    process.child = child


def wait_until_ready(processes: Sequence[PlannedProcess], api_key: str | None) -> None:
    """Waits until every process serves its names, with progress lines.

    Raises:
        LaunchError: For a process that ended or did not answer in time, with the end of its log.
    """
    began = time.monotonic()
    printed = {process.server.title: began for process in processes}  # time of the last progress line
    while not all(process.ready for process in processes):
        for process in processes:
            status = exit_status(process.child.pid)
            if status is not None:
                when = "after it was up" if process.ready else "while loading"
                title = process.server.title
                raise LaunchError(f"the server of {title} ended with status {status} {when}.\n{_log_tail(process)}")
        for process in (process for process in processes if not process.ready):
            server, now = process.server, time.monotonic()
            if stranger := port_users(server.host, server.port, server.leader)[1]:
                raise LaunchError(
                    f"port {server.port}, meant for {server.title}, is taken: {stranger} listens there. End it, or choose "
                    "another VLLM_PORT"
                )
            if server.answers(api_key):
                process.ready = True
            elif now - began > process.timeout_s:
                raise LaunchError(
                    f"the server of {server.title} did not answer within {process.timeout_s:g} s "
                    f"(VLLM_START_TIMEOUT).\n{_log_tail(process)}"
                )
            elif server.engine != GATEWAY and now - printed[server.title] > _PROGRESS_S:
                print(f"  {server.title} loading, {now - began:.0f} s: {_last_line(server.log)}", flush=True)
                printed[server.title] = now
        time.sleep(_POLL_S)


def _log_tail(process: PlannedProcess) -> str:
    log = process.server.log
    if log is None:
        return "Its output is above."
    lines = Path(log).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"End of its log ({log}):", *(f"  | {line}" for line in lines)])


def _last_line(log: str | None) -> str:
    if log is None:
        return "…"
    with open(log, "rb") as handle:
        handle.seek(max(0, os.path.getsize(log) - 4000))
        text = handle.read().decode(errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return lines[-1][:120] if lines else "…"
