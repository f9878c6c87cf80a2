"""The servers of each launch, in one folder per label under a runtime folder of this user; how they are recognized."""

import contextlib
import fcntl
import json
import os
import platform
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from vllm_server.settings import LaunchError

GATEWAY = "gateway"  # engine of the gateway's record
_STATE = "state.json"
_CLOCK_S = 2.0  # psutil's start times move by less when the system's clock is corrected


@dataclass(frozen=True)
class Server:
    """A process that serves, and how to recognize it: its pid may belong to another process by now."""

    title: str
    model: str  # folder or hub name
    url: str
    engine: str
    names: tuple[str, ...]  # everything it serves, adapters included
    gpus: tuple[str, ...]
    log: str | None  # None: the launch's own output
    pid: int
    started: float  # seconds since the epoch

    def alive(self) -> bool:
        """Whether this very process runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _CLOCK_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def members(self) -> list[psutil.Process]:
        """The running processes of the session that it leads or led; none once its pid was reused."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if abs(psutil.Process(self.pid).create_time() - self.started) >= _CLOCK_S:
                return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def state(self, api_key: str | None) -> str:
        """``healthy``: it lists its names; ``other key``: VLLM_API_KEY is not the launch's; ``not answering``, ``ended``."""
        if not self.alive():
            return "ended"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine's servers
        try:
            with opener.open(urllib.request.Request(f"{self.url}/v1/models", headers=headers), timeout=5) as answer:
                served = {row["id"] for row in json.loads(answer.read(1 << 20))["data"]}
        except urllib.error.HTTPError as error:
            return "other key" if error.code in (401, 403) else "not answering"
        except (OSError, ValueError, LookupError, TypeError):
            return "not answering"
        return "healthy" if set(self.names) <= served else "not answering"


def end(servers: Sequence[Server], grace_period_s: float = 20.0) -> list[psutil.Process]:
    """End servers with all processes of their sessions: the gateway first, so that it can answer its requests.

    Args:
        grace_period_s: Time for a server to end its own children, who would get in the way if they were signaled too.

    Returns:
        Processes that do not end even when killed.
    """
    left = []
    for front in (True, False):
        chosen = [server for server in servers if (server.engine == GATEWAY) == front]
        leaders = [psutil.Process(server.pid) for server in chosen if server.alive()]
        members = [process for server in chosen for process in server.members()]
        for process in leaders:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(leaders, grace_period_s)
        members += [process for server in chosen for process in server.members() if process not in members]
        for signal_it, seconds in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 10.0)):
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    signal_it(process)
            _, members = psutil.wait_procs(members, seconds)
        left += members
    return left


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, else paco-rl/HOST under XDG_STATE_HOME or ~/.local/state; created for this user alone.

    XDG_RUNTIME_DIR is removed when the user logs out, and files in /tmp when they are old: servers live longer. A home
    may be shared by several machines.

    Raises:
        LaunchError: The path is relative, or the folder belongs to another user, or others can write in it.
    """
    given = environment.get("PACO_RUNTIME_DIR")
    home = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    root = Path(given) if given else Path(home) / "paco-rl" / (platform.node() or "localhost")
    if not root.is_absolute():
        raise LaunchError(f"PACO_RUNTIME_DIR (or XDG_STATE_HOME) must be an absolute path, got {str(root)!r}")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise LaunchError(f"cannot create the runtime folder {root}: {error}; set PACO_RUNTIME_DIR") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise LaunchError(f"the runtime folder {root} is not a folder of this user; set PACO_RUNTIME_DIR to another")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LaunchError(f"others can write in the runtime folder {root}: `chmod go-w` it, or set PACO_RUNTIME_DIR")
    return root


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """One launch at a time of ``what``. Raises LaunchError."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"the lock {path} cannot be opened ({error.strerror}); remove it") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise LaunchError(f"another launch of {what} is in progress; wait, or choose another") from error
    finally:
        os.close(handle)


class LabelFolder:
    """The folder of one label: state.json, one log per server, and a lock during a launch."""

    def __init__(self, root: Path, label: str):
        self.path, self.label = root / label, label

    def read(self) -> list[Server]:
        """The servers; none where nothing was launched. Raises LaunchError for a damaged file."""
        try:
            rows = json.loads((self.path / _STATE).read_text())
            return [Server(**row | {"names": tuple(row["names"]), "gpus": tuple(row["gpus"])}) for row in rows]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{self.path / _STATE} is damaged ({error}); remove it if nothing runs") from error

    def write(self, servers: Sequence[Server]) -> None:
        """Replace state.json atomically."""
        temporary = self.path / f"{_STATE}.new"
        temporary.write_text(json.dumps([asdict(server) for server in servers], indent=1))
        temporary.replace(self.path / _STATE)

    def remove_ended(self) -> None:
        """Remove the state unless a server of it runs; logs stay."""
        if not any(server.alive() for server in self.read()):
            (self.path / _STATE).unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        """The log file of a server."""
        safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
        return self.path / f"{safe}.log"


def all_labels(root: Path) -> list[LabelFolder]:
    """The labels with a state, by name."""
    return [LabelFolder(root, path.parent.name) for path in sorted(root.glob(f"*/{_STATE}"))]
