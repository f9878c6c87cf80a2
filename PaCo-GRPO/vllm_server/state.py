"""What is known of the launched groups of servers: one folder per label under a runtime root of this user."""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vllm_server.processes import Process
from vllm_server.settings import LaunchError, local_url

GATEWAY = "gateway"  # title and engine of the gateway's record
_STATE, _LOCK = "state.json", "lock"


@dataclass(frozen=True)
class ServerRecord:
    """One server process: what it serves, where, and how it is recognised.

    ``title`` tells replicas apart; ``name``: the model's; ``names``: what it is asked for by, adapters too.
    """

    title: str
    name: str
    model: str
    host: str
    port: int
    engine: str
    log: str | None
    leader: Process
    members: tuple[Process, ...] = ()
    names: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where this machine reaches the server."""
        return local_url(self.host, self.port)


@dataclass(frozen=True)
class GroupState:
    """A launched group of servers, as it is written to state.json."""

    label: str
    ready: bool
    servers: tuple[ServerRecord, ...] = field(default_factory=tuple)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "GroupState":
        data = json.loads(text)
        servers = tuple(
            ServerRecord(
                **server
                | {"leader": Process(**server["leader"])}
                | {"members": tuple(Process(**member) for member in server["members"])}
                | {"names": tuple(server["names"]), "gpus": tuple(server["gpus"])}
            )
            for server in data["servers"]
        )
        return cls(data["label"], data["ready"], servers)


def runtime_root(environment: Mapping[str, str]) -> Path:
    """PACO_RUNTIME_DIR, or paco-rl-<uid> under XDG_RUNTIME_DIR, or under /tmp. Never relative to the working folder.

    Created for this user alone. Raises LaunchError when it belongs to somebody else or is not absolute.
    """
    given = environment.get("PACO_RUNTIME_DIR")
    root = Path(given) if given else Path(environment.get("XDG_RUNTIME_DIR") or "/tmp") / f"paco-rl-{os.getuid()}"
    if not root.is_absolute():
        raise LaunchError(f"PACO_RUNTIME_DIR must be an absolute path, got {str(root)!r}")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
    except OSError as error:
        raise LaunchError(f"cannot make the runtime folder {root}: {error}; set PACO_RUNTIME_DIR") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise LaunchError(f"the runtime folder {root} is not a folder of this user; set PACO_RUNTIME_DIR to another")
    return root


class LabelFolder:
    """The folder of one label: state.json, one log per server, and a lock held while launching."""

    def __init__(self, root: Path, label: str):
        self.path = root / label
        self.label = label

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one launch of a label at a time. Raises LaunchError if another one is at it."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        with open(self.path / _LOCK, "w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LaunchError(f"another launch of label {self.label!r} is under way") from error
            yield

    def read(self) -> GroupState | None:
        """None where there is no group. Raises LaunchError for a file that cannot be read."""
        try:
            return GroupState.from_json((self.path / _STATE).read_text())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{self.path / _STATE} is damaged ({error}); remove it if nothing runs") from error

    def write(self, state: GroupState) -> None:
        """Replace state.json in one step."""
        temporary = self.path / f"{_STATE}.new"
        temporary.write_text(state.to_json())
        temporary.replace(self.path / _STATE)

    def remove(self) -> None:
        """Forget the group; its logs stay, to be read."""
        (self.path / _STATE).unlink(missing_ok=True)

    def remove_ended(self) -> None:
        """Forget the group unless a server of it runs (a launch may have replaced what the caller had read)."""
        state = self.read()
        if state is not None and not any(server.leader.alive() for server in state.servers):
            self.remove()

    def log(self, name: str) -> Path:
        safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)
        return self.path / f"{safe}.log"


def all_labels(root: Path) -> list[LabelFolder]:
    """The labels that have a state, by name."""
    return [LabelFolder(root, path.parent.name) for path in sorted(root.glob(f"*/{_STATE}"))]
