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
        return cls(pid, stat.started) if stat and not stat.ended else None

    def alive(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and not stat.ended


@dataclass(frozen=True)
class _Stat:
    session: int
    started: int
    ended: bool  # a zombie: it still has its pid


def session_members(leader: Process) -> list[Process]:
    """The living processes of the session that ``leader`` leads, itself included; empty once its pid is given back.

    While the leader lives, or is a zombie that its parent has not yet asked about, its session can hold only its own
    descendants.
    """
    if not _has_pid(leader):
        return []
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None and stat.session == leader.pid and not stat.ended:
                members.append(Process(int(entry.name), stat.started))
    return members if _has_pid(leader) else []


def exit_status(pid: int) -> int | None:
    """The exit status of a child of ours (negative: its signal), None while it runs. It stays a zombie.

    So its session's number is not given to others, and what it left behind can still be found and ended.
    """
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def end_processes(processes: list[Process], leaders: list[Process], gently_s: float = 20.0) -> list[Process]:
    """End these processes: SIGTERM to the leaders (to all others, once those have ended), SIGKILL to what is left.

    Each of ``leaders`` leads a session of its own; what it has started since is ended too. Returns what still lives
    (nothing, unless the kernel will not let go of a process).
    """
    known = set(processes).union(*map(session_members, leaders))
    alive = [leader for leader in leaders if leader.alive()]
    if alive:
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
    """Whether one of them still lives; what they have started meanwhile becomes known."""
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
    return _Stat(session, started, state in "ZX")


def _has_pid(process: Process) -> bool:
    stat = _stat(process.pid)
    return stat is not None and stat.started == process.started
