"""Processes identified by pid *and* start time, ended gently and then forcibly; no other process is ever ended.
Which process listens on a port.

Linux only (/proc). A pid alone is not enough: it may belong to another process by now.
"""

import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Collection, Iterable
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


def port_users(host: str, port: int, leader: Process | None = None) -> tuple[bool, str | None]:
    """Whether the session of ``leader`` listens on a port, and which other process does (None: no other).

    Both are possible: vLLM allows other processes of its user on its port (SO_REUSEPORT); the kernel then divides the
    connections.
    """
    sockets = _listeners(host, port)
    open_in = _holders(sockets)
    members = session_members(leader) if leader and sockets else []
    ours = {open_in[member.pid] for member in members if member.pid in open_in}
    for name in sockets.keys() - ours:
        pid = next((pid for pid, held in open_in.items() if held == name), None)
        if pid:
            return bool(ours), f"pid {pid} ({_command(pid)})"
        if name in _listeners(host, port):  # otherwise it was closed in between
            return bool(ours), f"a process of user {sockets[name]}"
    return bool(ours), None


def _listeners(host: str, port: int) -> dict[str, str]:
    """The sockets that may get connections to ``host`` and ``port``: name in /proc/PID/fd -> id of the user."""
    wanted = {_plain(info[4][0].partition("%")[0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, local_port = fields[1].partition(":")
                if fields[3] != "0A" or int(local_port, 16) != port:  # 0A: listening
                    continue
                there = _plain(b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)))
                if any(
                    there.version == own.version and (there == own or there.is_unspecified or own.is_unspecified)
                    for own in wanted
                ):
                    found[f"socket:[{fields[9]}]"] = fields[7]
    return found


def _plain(address: str | bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IP address; an IPv4 address inside IPv6 as itself."""
    found = ipaddress.ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


def _holders(sockets: Collection[str]) -> dict[int, str]:
    """The processes that have one of the sockets open, as far as this user may see them: pid -> socket."""
    found = {}
    for entry in Path("/proc").iterdir() if sockets else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or belongs to another user
                for handle in (entry / "fd").iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        if (name := os.readlink(handle)) in sockets:
                            found[int(entry.name)] = name
    return found


def _command(pid: int) -> str:
    """The start of a process's command line, of printable characters."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
        return "".join(letter if letter.isprintable() else "?" for letter in text)[:80]
    return "it has ended"


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
