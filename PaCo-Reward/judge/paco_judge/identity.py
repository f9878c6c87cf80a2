"""Whose number it is: what tells weights and data apart, so that a result is shown for no others.

An identity is a text:

- ``sha256:…``: all bytes of a folder or file, wherever it lies and whatever it is called,
- ``org/name@commit``: a hub model, of which the local cache has that snapshot,
- the identities of a model and its adapters, joined by `` + ``.

None is an unknown identity, which equals nothing. Neither paths, addresses nor served names identify
anything: judges are copied, and exchanged under their names.
"""

import contextlib
import enum
import hashlib
import ipaddress
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from paco_judge.files import write_atomically

_JOINT = " + "
# Files of a model's folder that no loader reads.
_NOT_READ = {".md", ".pdf", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4"}
# Beginnings of the names of files that an adapter, and the processor beside it, are loaded from.
_OF_ADAPTER = ("adapter_", "processor_", "preprocessor_", "tokenizer", "chat_template")
_REMEMBERED = 2**24  # bytes: hashes of larger files, and of more bytes in several, are kept
_SETTLED_S = 2.0  # a file that changed later than this may change again within one clock tick
_DELAY_S = 10.0  # until a progress bar shows
_BLOB = re.compile(r"[0-9a-f]{64}")
# Earlier versions wrote shorter ones, which left out the middle of large files.
_EARLIER = re.compile(r"sha256:[0-9a-f]{32}")


class Match(enum.Enum):
    """How an identity that was written down compares with today's."""

    SAME = "the same weights"
    DIFFERENT = "other weights"
    UNKNOWN = "its server does not say which it has, or its folder is not here"
    EARLIER = "an earlier version wrote this, which did not record them"


UNRECORDED = ["unrecorded"]  # stands for the identity that an earlier version did not write


def match(before: Any, now: str | None) -> Match:
    """Compare two identities; ``before`` was written down, by an earlier version perhaps."""
    if isinstance(before, list):  # UNRECORDED, or the form of version 0.5
        return Match.EARLIER
    if before is None or now is None:
        return Match.UNKNOWN
    old_parts = before.split(_JOINT)
    new_parts = now.split(_JOINT)
    if any(map(_EARLIER.fullmatch, old_parts)):
        return Match.EARLIER
    if len(old_parts) != len(new_parts):
        return Match.DIFFERENT
    matches = list(map(_match_part, old_parts, new_parts))
    for worst in (Match.DIFFERENT, Match.UNKNOWN):
        if worst in matches:
            return worst
    return Match.SAME


def _match_part(before: str, now: str) -> Match:
    old_name, _, old_commit = before.rpartition("@")
    new_name, _, new_commit = now.rpartition("@")
    if bool(old_name) != bool(new_name):
        return Match.UNKNOWN  # a hub model and a folder: one may be a copy of the other
    if old_name.casefold() != new_name.casefold():
        return Match.DIFFERENT
    if not old_commit or not new_commit:
        return Match.UNKNOWN
    return Match.SAME if old_commit == new_commit else Match.DIFFERENT


def identity(*places: str | Path) -> str | None:
    """The identity of a model, or of a model and its adapters.

    Args:
        places: Files, folders, or names of hub models, which should be downloaded by now.

    Returns:
        None: One of them is not here.
    """
    return joined([_identity(place) for place in places])


def joined(identities: Sequence[str | None]) -> str | None:
    """One identity of several; None if one of them is unknown."""
    known = [part for part in identities if part is not None]
    return _JOINT.join(known) if len(known) == len(identities) else None


def _identity(place: str | Path) -> str | None:
    path = Path(place).expanduser()
    if path.exists():
        return _of_files(_weights_in(path))
    snapshot = _snapshot(str(place))
    if snapshot is None:
        return None
    hub_identity = f"{place}@{snapshot.name}"
    # The cache links to what it downloaded. Other files were put there by somebody.
    loose = {name: file for name, file in _weights_in(snapshot).items() if not file.is_symlink()}
    return f"{hub_identity}:{_of_files(loose)}" if loose else hub_identity


def _weights_in(path: Path) -> dict[str, Path]:
    """The files that a loader reads; of an adapter's folder, in which trainings write, its own."""
    of_adapter = (path / "adapter_config.json").is_file()
    files = {}
    for name, file in _files_in(path).items():
        is_read = file.suffix.lower() not in _NOT_READ
        if is_read and (not of_adapter or name.startswith(_OF_ADAPTER)):
            files[name] = file
    return files


def _snapshot(name: str) -> Path | None:
    """The folder of a hub model in the local cache, also of one that was downloaded in part."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        folder = getattr(error, "snapshot_path", None)  # of IncompleteSnapshotError
        return Path(folder) if folder else None
    except (OSError, ValueError):  # no hub name
        return None


def served_identity(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], url: str
) -> str | None:
    """The identity of a model that a server lists, as far as the server says it.

    Our servers say it. vLLM names the folder or hub model (``root``), of a LoRA also its ``parent``.

    Args:
        row: Of the model, in the answer to ``/v1/models``.
        rows: All of that answer.
        url: The server's address: only a server of this machine means this machine's folders.
    """
    if isinstance(row.get("identity"), str):
        return row["identity"]
    root = row.get("root")
    if not isinstance(root, str) or not root:
        return None
    if os.path.isabs(root):
        own = identity(root) if _is_loopback(url) else None
    else:
        # Which snapshot of the hub model the server has is not known.
        own = f"{root}@" if re.fullmatch(r"[\w.-]+/[\w.-]+", root) else None
    if not row.get("parent"):
        return own
    for parent in rows:
        if parent.get("id") == row["parent"] and parent is not row:
            return joined([served_identity(parent, rows, url), own])
    return None


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def fingerprint(*places: str | Path) -> str | None:
    """``sha256:…`` of data: all files of the places, which are files or folders.

    Names of files in folders count, hidden files do not.

    Returns:
        None if nothing of them is here.
    """
    files = {}
    for number, place in enumerate(places):
        for name, file in _files_in(Path(place).expanduser()).items():
            files[f"{number}/{name}"] = file
    return _of_files(files)


def _files_in(root: Path) -> dict[str, Path]:
    """Files that are not hidden, by their names below ``root``; "" if that is a file itself."""
    if root.is_file():
        return {"": root}
    files = {}
    for folder, folder_names, names in os.walk(root, followlinks=True):
        folder_names[:] = [name for name in folder_names if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                files[file.relative_to(root).as_posix()] = file
    return dict(sorted(files.items()))


def _of_files(files: Mapping[str, Path]) -> str | None:
    if not files:
        return None
    states = [(name, *_state(file)) for name, file in files.items()]

    def compute() -> str:
        total = hashlib.sha256()
        size = sum(state[2] for state in states)
        options = {"unit": "B", "unit_scale": True, "desc": "identity", "delay": _DELAY_S}
        with tqdm(total=size, **options) as progress:
            for name, file in files.items():
                total.update(f"{name}\0{_digest(file, progress)}\n".encode())
        return total.hexdigest()

    return f"sha256:{_remembered(states, compute)}"


def _state(file: Path) -> tuple[str, int, int, int, int]:
    """What changes when a file's bytes do: real path, size, times of change, inode."""
    target = file.resolve()
    status = target.stat()
    return str(target), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _digest(file: Path, progress: tqdm) -> str:
    """SHA-256 of a file's bytes."""
    target = file.resolve()
    state = _state(file)
    if target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
        digest = target.name  # the hub's cache names large files by their SHA-256
    else:
        digest = _remembered([("", *state)], lambda: _hash(target))
    progress.update(state[1])
    return digest


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _remembered(states: Sequence[tuple], compute: Callable[[], str]) -> str:
    """``compute()``, kept for as long as the files of these states stay what they are."""
    if sum(state[2] for state in states) < _REMEMBERED:
        return compute()
    key = hashlib.sha256(repr(states).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    record = cache / "paco-rl" / "sha256" / key
    with contextlib.suppress(OSError):
        return record.read_text()
    digest = compute()
    newest = max(max(state[3:5]) for state in states)
    if time.time() - newest / 1e9 > _SETTLED_S:
        with contextlib.suppress(OSError):  # a cache that cannot be written
            record.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(record, digest)
    return digest
