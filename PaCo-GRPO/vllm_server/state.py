"""The servers of each launch, in one folder per label under a runtime folder of this user."""

import contextlib
import fcntl
import os
import platform
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vllm_server.settings import LaunchError

GATEWAY = "gateway"  # engine of the gateway's record
STATE = "state.json"
MARK = "PACO_SERVER"  # variable that every process of a server inherits
_CLOCK_S = 2.0  # psutil's start times move by less when the system's clock is corrected
_MOST_PID = 1 << 22  # of Linux


@dataclass
class Server:
    """A process that serves; its pid may belong to another process by now."""

    name: str
    model: str  # folder or hub name
    url: str
    engine: str
    names: tuple[str, ...]  # everything it serves
    gpus: tuple[str, ...]
    command: list[str]
    api_servers: int = 1
    log: str = ""
    pid: int = 0
    started: float = 0.0  # seconds since the epoch
    mark: str = ""  # the value of MARK in its environment, which no other server has

    def leader(self) -> psutil.Process | None:
        """Its first process, if it still runs: the pid and the start time are those recorded."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            started_then = abs(process.create_time() - self.started) < _CLOCK_S
            if started_then and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def alive(self) -> bool:
        """Whether this very process runs."""
        return self.leader() is not None

    def members(self) -> list[psutil.Process]:
        """Its first process and what descends from it, which may outlive it; nothing else."""
        members = []
        if leader := self.leader():
            members.append(leader)
            with contextlib.suppress(psutil.NoSuchProcess):
                members += leader.children(recursive=True)
        for process in psutil.process_iter():
            # Others' environments cannot be read, and are not ours.
            with contextlib.suppress(psutil.Error, OSError):
                is_marked = bool(self.mark) and process.environ().get(MARK) == self.mark
                if is_marked and process not in members:
                    members.append(process)
        return [process for process in members if _runs(process)]

    def state(self, api_key: str | None) -> str:
        """``healthy``, ``other key``, ``loading or stuck``, or ``ended``.

        A healthy server lists its names. ``other key``: it does not accept the key of the launch.
        """
        if not self.alive():
            return "ended"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:  # trust_env: no proxy for this machine's servers
            answer = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=5, trust_env=False)
            if answer.status_code in (401, 403):
                return "other key"
            served = {row["id"] for row in answer.json()["data"]}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
            served = set()
        return "healthy" if set(self.names) <= served else "loading or stuck"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_SERVERS = TypeAdapter(list[Server])


def read_servers(folder: Path) -> list[Server]:
    """The servers of a label; none if nothing was launched. Raises LaunchError."""
    _check_private(folder)
    file = folder / STATE
    try:
        servers = _SERVERS.validate_json(file.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        raise _damaged(file) from error
    # 0 would mean our own session to the system, and 1 and -1 every process.
    if any(not (1 < server.pid <= _MOST_PID and server.started > 0) for server in servers):
        raise _damaged(file)
    return servers


def _damaged(file: Path) -> LaunchError:
    return LaunchError(f"{file} is damaged; remove it if nothing runs")


def write_servers(folder: Path, servers: Sequence[Server]) -> None:
    """Replace the state of a label atomically. Raises LaunchError."""
    temporary = folder / f"{STATE}.new"
    try:
        temporary.write_bytes(_SERVERS.dump_json(list(servers), indent=1))
        temporary.replace(folder / STATE)
    except OSError as error:
        raise LaunchError(
            f"cannot write {folder / STATE} ({error.strerror}): free some space, or set "
            "PACO_RUNTIME_DIR"
        ) from error


def end_servers(
    folder: Path, servers: Sequence[Server], grace_period_s: float = 20.0
) -> list[Server]:
    """End servers with all their children; their logs stay.

    The gateway is first, so that it can answer its requests.
    ``grace_period_s``: for a server to end its own children. Returns the servers that were running.
    Raises LaunchError.
    """
    running = [server for server in servers if server.members()]
    gateways = [server for server in running if server.engine == GATEWAY]
    engines = [server for server in running if server.engine != GATEWAY]
    for group in (gateways, engines):
        leaders = [server.leader() for server in group]
        _signal(psutil.Process.terminate, list(filter(None, leaders)), grace_period_s)
        _signal(psutil.Process.terminate, _members(group), 2.0)
        _signal(psutil.Process.kill, _members(group), 10.0)
    if remaining := _members(running):
        pids = [process.pid for process in remaining]
        raise LaunchError(f"processes {pids} do not end, even when killed")
    (folder / STATE).unlink(missing_ok=True)
    return running


def _members(servers: Sequence[Server]) -> list[psutil.Process]:
    return [process for server in servers for process in server.members()]


def _signal(
    send: Callable[[psutil.Process], None], processes: list[psutil.Process], seconds: float
) -> None:
    """``send`` a signal to processes, and wait until they have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)
    # psutil.wait_procs would wait for zombies, which stay where no init process collects them.
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, or a folder of this machine in the user's home.

    That is paco-rl/HOST under XDG_STATE_HOME or ~/.local/state, because machines may share a home.

    Raises LaunchError: The folder cannot be created, belongs to another user, or others can write
    in it.
    """
    home = Path(environment.get("HOME") or Path.home())
    state_home = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state")
    default = state_home / "paco-rl" / (platform.node() or "localhost")
    root = Path(environment.get("PACO_RUNTIME_DIR") or default).absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot create the runtime folder: {error}; set PACO_RUNTIME_DIR"
        ) from error
    _check_private(root.resolve())
    return root


def _check_private(folder: Path) -> None:
    """Raises LaunchError: Others could exchange what is in a folder."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    remedy = "remove it, or choose another VLLM_LABEL or PACO_RUNTIME_DIR"
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{folder} is not a folder, but a file or a link: {remedy}")
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise LaunchError(f"others can write in {folder}: `chmod go-w` it, {remedy}")


def label_folder(environment: Mapping[str, str]) -> Path:
    """The folder of VLLM_LABEL, for its state and logs. Raises LaunchError."""
    label = environment.get("VLLM_LABEL") or "default"
    is_name = re.fullmatch(r"(?=.*[^.])[A-Za-z0-9._-]{1,64}", label)
    if not is_name or label.endswith(".lock"):  # files with this ending lie beside the labels
        raise LaunchError(
            "VLLM_LABEL must be 1 to 64 letters, digits, '.', '_' or '-', and not end with .lock; "
            f"got {label!r}"
        )
    folder = runtime_root(environment) / label
    _check_private(folder)
    return folder


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """One launch at a time of ``what``. Raises LaunchError."""
    try:
        handle = open(path, "a")  # noqa: SIM115  (closed below, after the launch)
    except OSError as error:
        raise LaunchError(f"cannot lock {path} ({error.strerror}): remove it") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(
                f"another launch of {what} is in progress; wait, or choose another"
            ) from error
        yield
