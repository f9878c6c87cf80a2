"""The process table: the servers of each launch, in one folder per label under a runtime folder of this user."""

import contextlib
import fcntl
import http.client
import json
import os
import platform
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from vllm_server.processes import Process, end_processes, port_users
from vllm_server.settings import LaunchError, local_url

GATEWAY = "gateway"  # title and engine of the gateway's record
_STATE, _LOCK = "state.json", "lock"


@dataclass(frozen=True)
class Server:
    """One server process: what it serves, where, and how to recognize it."""

    title: str  # differs between replicas
    name: str  # of the model
    model: str
    host: str
    port: int
    engine: str
    log: str | None = None
    leader: Process | None = None  # None: not started
    members: tuple[Process, ...] = ()
    names: tuple[str, ...] = ()  # everything it serves, adapters included
    gpus: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where this machine reaches the server."""
        return local_url(self.host, self.port)

    def answers(self, api_key: str | None, timeout_s: float = 5.0) -> bool:
        """Whether this very server, and no other process on its port, is healthy and serves all its names."""
        return port_users(self.host, self.port, self.leader) == (True, None) and self._replies(api_key, timeout_s)

    def _replies(self, api_key: str | None, timeout_s: float) -> bool:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                return False
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
            served = json.loads(connection.getresponse().read())["data"]
            return set(self.names) <= {entry["id"] for entry in served}
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return False
        finally:
            connection.close()


@dataclass(frozen=True)
class Group:
    """The servers of one launch, as written to state.json. ``ready``: all of them have answered."""

    label: str
    ready: bool
    servers: tuple[Server, ...] = ()


def end_servers(servers: Sequence[Server]) -> list[Process]:
    """Ends servers: the gateway first, so that it can answer its requests. Returns processes that are still running."""
    left = []
    for front in (True, False):
        part = [server for server in servers if (server.engine == GATEWAY) == front]
        members = [member for server in part for member in server.members]
        left += end_processes(members, [server.leader for server in part])
    return left


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, else paco-rl/HOST under XDG_STATE_HOME or ~/.local/state; created for this user alone.

    XDG_RUNTIME_DIR is removed when the user logs out, and files in /tmp when they are old: servers live longer. A home
    may be shared by several machines.

    Raises:
        LaunchError: When the path is relative, or the folder belongs to another user.
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
    return root


@contextlib.contextmanager
def port_locked(root: Path, port: int, label: str) -> Iterator[None]:
    """One launch on a port at a time: two would load for minutes, and vLLM would let both listen. Raises LaunchError."""
    with open(root / f"port-{port}.lock", "a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise LaunchError(
                f"port {port} is taken: {handle.read() or 'another launch'} is in progress there; choose another VLLM_PORT"
            ) from error
        handle.truncate(0)
        handle.write(f"the launch of label {label!r} (pid {os.getpid()})")
        handle.flush()
        yield


class LabelFolder:
    """The folder of one label: state.json, one log per server, and a lock during a launch."""

    def __init__(self, root: Path, label: str):
        self.path, self.label = root / label, label

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One launch of a label at a time. Raises LaunchError during another one."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        with open(self.path / _LOCK, "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LaunchError(f"another launch of label {self.label!r} is in progress") from error
            yield

    def read(self) -> Group | None:
        """None where there is no group. Raises LaunchError for a damaged file."""
        try:
            data = json.loads((self.path / _STATE).read_text())
            servers = [
                Server(**server | {"leader": Process(**server["leader"]),
                                   "members": tuple(Process(**member) for member in server["members"]),
                                   "names": tuple(server["names"]), "gpus": tuple(server["gpus"])})
                for server in data["servers"]
            ]  # fmt: skip
            return Group(data["label"], data["ready"], tuple(servers))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{self.path / _STATE} is damaged ({error}); remove it if nothing runs") from error

    def write(self, group: Group) -> None:
        """Replaces state.json atomically."""
        temporary = self.path / f"{_STATE}.new"
        temporary.write_text(json.dumps(asdict(group), indent=1))
        temporary.replace(self.path / _STATE)

    def remove(self) -> None:
        """Removes the group; its logs stay."""
        (self.path / _STATE).unlink(missing_ok=True)

    def remove_ended(self) -> None:
        """Removes the group unless a server of it runs (another launch may have replaced it)."""
        group = self.read()
        if group is not None and not any(server.leader.alive() for server in group.servers):
            self.remove()

    def log(self, name: str) -> Path:
        """The log file of a server."""
        safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
        return self.path / f"{safe}.log"


def all_labels(root: Path) -> list[LabelFolder]:
    """The labels with a group, by name."""
    return [LabelFolder(root, path.parent.name) for path in sorted(root.glob(f"*/{_STATE}"))]
