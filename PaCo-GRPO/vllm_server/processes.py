"""Processes of ours: known by pid *and* start time, ended gently and then hard, and nothing else ever ended.

Linux only (/proc). A pid alone is not enough: it may have been given to somebody else's process since.
"""

import os
import signal
import time
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
        """The living process with this pid; None if there is none (a zombie has ended)."""
        stat = _stat(pid)
        return cls(pid, stat.started) if stat else None

    def alive(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started


@dataclass(frozen=True)
class _Stat:
    session: int
    started: int


def session_members(leader: Process) -> list[Process]:
    """The living processes of the session that ``leader`` leads, itself included; empty once it has ended.

    While the leader lives, its session can hold only its own descendants.
    """
    if not leader.alive():
        return []
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None and stat.session == leader.pid:
                members.append(Process(int(entry.name), stat.started))
    return members if leader.alive() else []


def end_processes(processes: list[Process], leaders: list[Process], gently_s: float = 20.0) -> list[Process]:
    """End these processes: SIGTERM to the leaders (to all others, once those have ended), SIGKILL to what is left.

    Each of ``leaders`` leads a session of its own; what it has started since is ended too. Returns what still lives
    (nothing, unless the kernel will not let go of a process).
    """
    known = set(processes)
    alive = [leader for leader in leaders if leader.alive()]
    if alive:
        known.update(*map(session_members, alive))
        # A leader ends its children in order; they would only get in its way if they were signalled too.
        _signal(alive, signal.SIGTERM)
        _wait(lambda: _ending(known, alive), gently_s)
    left = [process for process in known if process.alive()]
    if left:
        _signal(left, signal.SIGTERM)
        _wait(lambda: [process for process in left if process.alive()], 2.0)
        _signal(left, signal.SIGKILL)
        _wait(lambda: [process for process in left if process.alive()], 10.0)
    return [process for process in known if process.alive()]


def _ending(known: set[Process], leaders: list[Process]) -> bool:
    """Whether a leader still lives; what they have started meanwhile becomes known."""
    known.update(*map(session_members, leaders))
    return any(leader.alive() for leader in leaders)


def _signal(processes: list[Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            # The file descriptor pins the process: between the check and the signal the pid cannot change hands.
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if process.alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass  # it ended in between, which is what was wanted
        finally:
            os.close(descriptor)


def _wait(left, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    state, session, started = fields[0], int(fields[3]), int(fields[19])
    return None if state in "ZX" else _Stat(session, started)
