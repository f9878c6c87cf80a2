"""Processes identified by pid *and* start time, ended gently and then forcibly; no other process is ever ended.

Linux only (/proc). A pid alone is not enough: it may belong to another process by now.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05


@dataclass(frozen=True)
class Process:
    """A process by pid and start time (clock ticks since boot)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The running process with this pid, if any (a zombie has ended)."""
        state, _, started = _stat(pid)
        return cls(pid, started) if state not in "ZX" else None

    def alive(self) -> bool:
        """Whether it still runs: its pid may belong to another process by now."""
        return Process.of(self.pid) == self


def _stat(pid: int) -> tuple[str, int, int]:
    """State letter, session and start time of a process; an ended one without a pid is ("X", 0, 0)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0, 0
    fields = text[text.rindex(")") + 2 :].split()  # the name before may contain spaces and brackets
    return fields[0], int(fields[3]), int(fields[19])


def session_members(leader: Process) -> list[Process]:
    """The running processes of the session that ``leader`` leads, itself included; empty once its pid was reused.

    While the leader runs, or is a zombie that its parent has not collected, its session contains only its descendants.
    """
    members = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        state, session, started = _stat(pid)
        if session == leader.pid and state not in "ZX":
            members.append(Process(pid, started))
    return members if _stat(leader.pid)[2] == leader.started else []


def exit_status(pid: int) -> int | None:
    """The exit status of a child of ours (negative: its signal), None while it runs.

    The child stays a zombie, so that its session's number is not reused and the processes it left behind can be ended.
    """
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def end_processes(processes: Iterable[Process], leaders: Iterable[Process], gently_s: float = 20.0) -> list[Process]:
    """Ends processes: SIGTERM to the leaders, then to all others, then SIGKILL.

    Args:
        leaders: Each leads a session; every process of it is ended too.
        gently_s: Time for the leaders to end their own children, who would get in the way if they were signaled too.

    Returns:
        Processes that are still running (none, unless the kernel does not let go of one).
    """
    known, running = set(processes), [leader for leader in leaders if leader.alive()]

    def any_leader() -> bool:
        known.update(*map(session_members, leaders))
        return any(leader.alive() for leader in running)

    def left() -> list[Process]:
        return [process for process in known if process.alive()]

    if any_leader():
        _signal(running, signal.SIGTERM)
        _wait(any_leader, gently_s)
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        _signal(left(), number)
        _wait(left, seconds)
    return left()


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            if process.alive():
                os.kill(process.pid, number)


def _wait(left, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
