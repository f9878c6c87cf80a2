"""The run's folder: who may write to it, its checkpoints by epoch, their hashes and weights."""

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paco_grpo.atomic import sync_folder, write_atomically
from paco_grpo.distributed.processes import full_tensor, shard_like
from paco_grpo.options import ConfigError

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
HASHES_FILE = "SHA256SUMS"  # in ``state/`` of a checkpoint, as ``sha256sum -c`` reads it
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


# --- the folder of a run ------------------------------------------------------------------------


def expanded(place: str | Path, option: str) -> Path:
    """``place`` with its ``~``, as an absolute path.

    A ``ConfigError`` names ``option`` if it cannot be one.
    """
    try:
        path = Path(place).expanduser().absolute()
        path.exists()  # a name may be too long for the file system
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option}={str(place)[:200]!r} cannot be a path: {reason}") from error
    return path


class RunFolder:
    """The folder of one run. The main process claims it, so that two trainers never share one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIOWrapper | None = None

    def claim(self) -> None:
        """Make the folder and lock it.

        A ``ConfigError`` if it cannot be written to, or another trainer has it.
        """
        check_writable(self.path)
        self._lock = lock_folder(self.path)

    def release(self, remove_if_unused: bool = False) -> None:
        """Let another trainer have the folder.

        ``remove_if_unused``: remove it if nothing was done in it yet.
        """
        if self._lock is None:
            return
        if remove_if_unused and self.path.is_dir():
            names = {path.name for path in self.path.iterdir()}
            if names <= {LOCK_FILE, "questions.json"}:
                shutil.rmtree(self.path)
        self._lock.close()
        self._lock = None


def lock_folder(folder: Path) -> TextIOWrapper:
    """An exclusive lock on a run folder, until the returned file is closed.

    The file says which process has the lock, for the ``ConfigError`` of the next one.
    """
    path = folder / LOCK_FILE
    try:
        # Without O_TRUNC, because who fails to get the lock must be able to read who has it.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:  # the target of a link would be overwritten
            raise ConfigError(f"{path} is a link; remove it") from error
        raise ConfigError(f"{path} cannot be opened ({error.strerror}); remove it") from error
    file = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            logger.warning(
                "%s is on a file system without locks (%s): see that no other trainer uses it",
                folder,
                error.strerror,
            )
            return file
        owner = file.read(200).strip()
        file.close()
        who = f" ({owner})" if owner else ""
        raise ConfigError(
            f"{folder} is in use by another trainer{who}; end it, or choose another "
            "--config.run_name"
        ) from None
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
    file.flush()
    return file


def check_writable(folder: Path, needed_bytes: int = 0, option: str = "config.save_dir") -> None:
    """Make ``folder``.

    A ``ConfigError`` names ``option`` if the folder cannot be written to or lacks space.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}); set {option} to another folder"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        free_mib = free / 2**20
        needed_mib = needed_bytes / 2**20
        raise ConfigError(
            f"{folder} has {free_mib:.0f} MiB free, but checkpoints and the pictures of an "
            f"evaluation need about {needed_mib:.0f} MiB more; free some or change {option}"
        )


# --- checkpoints by epoch -----------------------------------------------------------------------


def checkpoint_name(epoch: int) -> str:
    """Folder name after ``epoch`` epochs."""
    return f"epoch_{epoch:04d}"


def epoch_of(path: Path) -> int | None:
    """The epoch in a name of ``checkpoint_name``.

    None for others: ``epoch_0001_keep`` is the user's own.
    """
    name = re.fullmatch(r"epoch_(\d+)", path.name)
    return int(name[1]) if name else None


def _by_epoch(folder: Path) -> list[tuple[int, Path]]:
    """Epoch and path of what ``checkpoint_name`` named, oldest first."""
    named = [(epoch_of(path), path) for path in folder.glob("epoch_*")]
    return sorted((epoch, path) for epoch, path in named if epoch is not None)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first, also those that were damaged later.

    A checkpoint gets its name only when it is whole.
    """
    return [path for _, path in _by_epoch(folder) if (path / "state").is_dir()]


def find_checkpoint(resume_from: str, run_dir: Path) -> Path | None:
    """The checkpoint that ``config.resume_from`` means.

    It is ``latest`` (in ``run_dir``), or the path of a checkpoint or run. Returns None for
    ``latest`` when this run has no checkpoint yet; another path without one is a
    ``CheckpointError``.
    """
    path = run_dir
    if resume_from != "latest":
        path = expanded(resume_from, "config.resume_from")
    if (path / "state").is_dir():
        return path
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints and resume_from != "latest":
        raise CheckpointError(f"config.resume_from={resume_from!r} holds no checkpoint")
    return checkpoints[-1] if checkpoints else None


def begin(partial: Path) -> None:
    """Make the folder that a checkpoint is written to, empty."""
    _remove(partial)
    (partial / "state").mkdir(parents=True)


def commit(partial: Path, final: Path) -> None:
    """Sync the folder to disk and give it its name: a checkpoint appears when it is whole."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    _remove(final)
    partial.rename(final)
    sync_folder(final.parent)


def archive_superseded(folder: Path, epoch: int) -> None:
    """Rename what is later than ``epoch``, where a run resumes.

    ``latest`` must not mean the abandoned course.
    """
    for number, path in _by_epoch(folder):
        if number > epoch:
            target = path.with_name(f"replaced_{path.name}")
            _remove(target)
            path.rename(target)


def prune(root: Path, limit: int) -> None:
    """Remove the oldest checkpoints beyond ``limit``.

    What an earlier removal or writing has left behind goes, too.
    """
    for path in list_checkpoints(root)[:-limit]:
        _remove(path)
    for pattern in (".*.removed", ".*.partial"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a folder that may not exist.

    It loses its name first, so that half of it is never taken for a whole.
    """
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name.lstrip('.')}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# --- the files of a checkpoint ------------------------------------------------------------------


def write_hashes(folder: Path) -> None:
    """Write the SHA-256 of every file in ``folder`` beside them."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / HASHES_FILE, "".join(lines))


def check_hashes(folder: Path) -> bool:
    """Raise a ``ValueError`` for a file that is not as ``write_hashes`` saw it.

    Returns False if there are no hashes.
    """
    path = folder / HASHES_FILE
    if not path.is_file():
        return False
    names = []
    for line in path.read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        if not name or Path(name).name != name:
            raise ValueError(f"{HASHES_FILE} is damaged")
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        if _sha256(folder / name) != expected:
            raise ValueError(f"{name} was changed after it was saved (its SHA-256 differs)")
        names.append(name)
    if "trainer.json" not in names:
        raise ValueError(f"{HASHES_FILE} is damaged")
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], write: bool) -> None:
    """Write tensors by name.

    Sharded ones are gathered: every process calls it, and one has ``write`` set.
    """
    whole = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor)
        if write:
            whole[name] = value.cpu().contiguous().clone()
    if write:
        save_file(whole, path)


def load_finite(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file; a ``ValueError`` names one that is not finite."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path.name}: {name} is not finite")
    return tensors


@torch.no_grad()
def load_into(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into ``tensors``, sharded or not."""
    saved = load_finite(path)
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if saved_shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise ValueError(f"{path.name} holds other weights than this run trains")
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(saved[name], tensor))
