"""The servers of each launch, in one folder per label under a runtime folder of this user."""

import contextlib
import fcntl
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from vllm_server.plan import LaunchError

GATEWAY = "gateway"  # engine of the gateway's record
STATE = "state.json"
_CLOCK_S = 2.0  # psutil's start times move by less when the system's clock is corrected


@dataclass
class Server:
    """A process that serves; its pid may belong to another process by now."""

    name: str
    model: str  # folder or hub name
    url: str
    engine: str
    names: tuple[str, ...]  # everything it serves, adapters included
    gpus: tuple[str, ...]
    command: list[str]
    log: str = ""
    pid: int = 0
    started: float = 0.0  # seconds since the epoch

    def alive(self) -> bool:
        """Whether this very process runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return self._is(process) and process.status() != psutil.STATUS_ZOMBIE
        return False

    def members(self) -> list[psutil.Process]:
        """Itself and the processes that it started, which may outlive it; none once its pid was reused."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if not self._is(psutil.Process(self.pid)):
                return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _is(self, process: psutil.Process) -> bool:
        return abs(process.create_time() - self.started) < _CLOCK_S

    def state(self, api_key: str | None) -> str:
        """``healthy``: it lists its names; ``other key``: not the launch's; ``loading or stuck``; ``ended``."""
        if not self.alive():
            return "ended"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:  # trust_env: no proxy for this machine's servers
            answer = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=5, trust_env=False)
            if answer.status_code in (401, 403):
                return "other key"
            served = {row["id"] for row in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            served = set()
        return "healthy" if set(self.names) <= served else "loading or stuck"


_SERVERS = TypeAdapter(list[Server])


def read(folder: Path) -> list[Server]:
    """The servers of a label; none if nothing was launched. Raises LaunchError."""
    try:
        return _SERVERS.validate_json((folder / STATE).read_bytes())
    except FileNotFoundError:
        return []
    except ValidationError as error:
        raise LaunchError(f"{folder / STATE} is damaged; remove it if nothing runs") from error


def write(folder: Path, servers: Sequence[Server]) -> None:
    """Replace the state of a label atomically."""
    temporary = folder / f"{STATE}.new"
    temporary.write_bytes(_SERVERS.dump_json(list(servers), indent=1))
    temporary.replace(folder / STATE)


def end(folder: Path, servers: Sequence[Server], grace_period_s: float = 20.0) -> None:
    """End servers with all their children: the gateway first, so that it can answer its requests. Logs stay.

    ``grace_period_s``: for a server to end its own children. Raises LaunchError.
    """
    for front in (True, False):
        chosen = [server for server in servers if (server.engine == GATEWAY) == front]
        leaders = [psutil.Process(server.pid) for server in chosen if server.alive()]
        _signal(psutil.Process.terminate, leaders, grace_period_s)
        for signal_it, seconds in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 10.0)):
            _signal(
                signal_it, [process for server in chosen for process in server.members()], seconds
            )
    if left := [server.pid for server in servers if server.alive()]:
        raise LaunchError(f"processes {left} do not end, even when killed")
    (folder / STATE).unlink(missing_ok=True)


def _signal(signal_it, processes: list[psutil.Process], seconds: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            signal_it(process)
    psutil.wait_procs(processes, seconds)


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, else paco-rl/HOST under XDG_STATE_HOME or ~/.local/state (machines may share a home).

    Raises LaunchError: The folder cannot be created, belongs to another user, or others can write in it.
    """
    home = (
        environment.get("XDG_STATE_HOME")
        or Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    )
    own = Path(home) / "paco-rl" / (platform.node() or "localhost")
    root = Path(environment.get("PACO_RUNTIME_DIR") or own).absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot create the runtime folder: {error}; set PACO_RUNTIME_DIR"
        ) from error
    if root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o022:
        raise LaunchError(
            f"others can write in the runtime folder {root}: `chmod go-w` it, or set PACO_RUNTIME_DIR"
        )
    return root


def label_folder(environment: Mapping[str, str]) -> Path:
    """The folder of VLLM_LABEL, for its state and logs. Raises LaunchError."""
    label = environment.get("VLLM_LABEL") or "default"
    if not re.fullmatch(r"(?=.*[^.])[A-Za-z0-9._-]{1,64}", label):
        raise LaunchError(
            f"VLLM_LABEL must be 1 to 64 letters, digits, '.', '_' or '-', got {label!r}"
        )
    return runtime_root(environment) / label


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """One launch at a time of ``what``. Raises LaunchError."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(
                f"another launch of {what} is in progress; wait, or choose another"
            ) from error
        yield
