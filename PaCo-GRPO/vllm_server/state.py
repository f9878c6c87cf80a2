"""The servers of each launch, in one folder per label under a runtime folder of this user; how they are recognized."""

import contextlib
import fcntl
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from vllm_server.plan import LaunchError

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
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return self._is(process) and process.status() != psutil.STATUS_ZOMBIE
        return False

    def members(self) -> list[psutil.Process]:
        """The running processes that it started, which may outlive it, and itself; none once its pid was reused."""
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
        """``healthy``: it lists its names; ``other key``: VLLM_API_KEY is not the launch's; ``not answering``, ``ended``."""
        if not self.alive():
            return "ended"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:  # trust_env: no proxy for this machine's servers
            answer = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=5, trust_env=False)
            if answer.status_code in (401, 403):
                return "other key"
            served = {row["id"] for row in answer.json()["data"]}
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return "not answering"
        return "healthy" if set(self.names) <= served else "not answering"


def end(servers: Sequence[Server], grace_period_s: float = 20.0) -> None:
    """End servers with all their children: the gateway first, so that it can answer its requests.

    ``grace_period_s``: for a server to end its own children, who would get in the way if they were signaled too.
    """
    for front in (True, False):
        chosen = [server for server in servers if (server.engine == GATEWAY) == front]
        leaders = [psutil.Process(server.pid) for server in chosen if server.alive()]
        for leader in leaders:
            with contextlib.suppress(psutil.NoSuchProcess):
                leader.terminate()
        psutil.wait_procs(leaders, grace_period_s)
        for signal_it, seconds in ((psutil.Process.terminate, 2.0), (psutil.Process.kill, 10.0)):
            members = [process for server in chosen for process in server.members()]
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    signal_it(process)
            psutil.wait_procs(members, seconds)


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, else paco-rl/HOST under XDG_STATE_HOME or ~/.local/state (a home may be shared by machines).

    Raises LaunchError: The path is relative, or the folder belongs to another user, or others can write in it.
    """
    given = environment.get("PACO_RUNTIME_DIR")
    home = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    root = Path(given) if given else Path(home) / "paco-rl" / (platform.node() or "localhost")
    if not root.is_absolute():
        raise LaunchError(f"PACO_RUNTIME_DIR (or XDG_STATE_HOME) must be an absolute path, got {str(root)!r}")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise LaunchError(f"cannot create the runtime folder {root}: {error}; set PACO_RUNTIME_DIR") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise LaunchError(f"others can write in the runtime folder {root}: `chmod go-w` it, or set PACO_RUNTIME_DIR")
    return root


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """One launch at a time of ``what``. Raises LaunchError."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(f"another launch of {what} is in progress; wait, or choose another") from error
        yield


class LabelFolder:
    """The folder of one label: state.json, one log per server, and a lock during a launch."""

    def __init__(self, path: Path):
        self.path, self.label = path, path.name

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "LabelFolder":
        """The folder of VLLM_LABEL. Raises LaunchError."""
        label = environment.get("VLLM_LABEL") or "default"
        if not re.fullmatch(r"(?=.*[^.])[A-Za-z0-9._-]{1,64}", label):
            raise LaunchError(f"VLLM_LABEL must be 1 to 64 letters, digits, '.', '_' or '-', got {label!r}")
        return cls(runtime_root(environment) / label)

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
        return self.path / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.log"


def all_labels(root: Path) -> list[LabelFolder]:
    """The labels with a state, by name."""
    return [LabelFolder(path.parent) for path in sorted(root.glob(f"*/{_STATE}"))]
