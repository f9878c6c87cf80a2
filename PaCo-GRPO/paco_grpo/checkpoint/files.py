"""The run's folder: who may write to it, its checkpoints by epoch, and weights as safetensors."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file

from paco_grpo.atomic import write_atomically  # noqa: F401 - also found here
from paco_grpo.distributed.processes import full_tensor, shard_like
from paco_grpo.options import ConfigError

LOCK_FILE = ".lock"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def lock_folder(folder: Path) -> FileLock:
    """An exclusive lock on a run folder, so that two trainers never share one, else a ``ConfigError``."""
    lock = FileLock(folder / LOCK_FILE)
    if (folder / LOCK_FILE).is_symlink():  # its target would be overwritten
        raise ConfigError(f"{folder / LOCK_FILE} is a link; remove it")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"{folder} is in use by another trainer; end it, or choose another --config.run_name"
        ) from None
    return lock


def checkpoint_name(epoch: int) -> str:
    """Folder name after ``epoch`` epochs."""
    return f"epoch_{epoch:04d}"


def _by_epoch(folder: Path) -> list[tuple[int, Path]]:
    """Epoch and path of what ``checkpoint_name`` named, oldest first; ``epoch_0001_keep`` is the user's own."""
    named = [(re.fullmatch(r"epoch_(\d+)", path.name), path) for path in folder.glob("epoch_*")]
    return sorted((int(name[1]), path) for name, path in named if name)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first."""
    return [path for _, path in _by_epoch(folder) if (path / "state" / "trainer.json").is_file()]


def find_checkpoint(resume_from: str, run_dir: Path) -> Path | None:
    """The checkpoint that ``config.resume_from`` means: ``latest`` (in ``run_dir``), or a checkpoint's or run's path.

    Returns None for ``latest`` when this run has no checkpoint yet; another path without one is a ``CheckpointError``.
    """
    path = run_dir if resume_from == "latest" else Path(resume_from).expanduser()
    if (path / "state" / "trainer.json").is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found and resume_from != "latest":
        raise CheckpointError(f"config.resume_from={resume_from!r} holds no checkpoint")
    return found[-1] if found else None


def begin(partial: Path) -> None:
    """Make the folder that a checkpoint is written to, empty."""
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "state").mkdir(parents=True)


def commit(partial: Path, final: Path) -> None:
    """Sync the folder to disk and give it its name: a checkpoint appears when it is whole."""
    for path in filter(Path.is_file, partial.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def archive_superseded(folder: Path, epoch: int) -> None:
    """Rename what is later than ``epoch``, where a run resumes: 'latest' must not mean the abandoned course."""
    for number, path in _by_epoch(folder):
        if number > epoch:
            target = path.with_name(f"replaced_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def prune(root: Path, limit: int) -> None:
    """Remove the oldest checkpoints beyond ``limit``."""
    for path in list_checkpoints(root)[:-limit]:
        shutil.rmtree(path)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], write: bool) -> None:
    """Write tensors by name. Sharded ones are gathered: every process calls it, and one has ``write`` set."""
    whole = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor)
        if write:
            whole[name] = value.cpu().contiguous().clone()
    if write:
        save_file(whole, path)


@torch.no_grad()
def load_into(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into ``tensors``, sharded or not."""
    saved = load_file(path)
    if {n: tuple(t.shape) for n, t in saved.items()} != {
        n: tuple(t.shape) for n, t in tensors.items()
    }:
        raise ValueError(f"{path.name} holds other weights than this run trains")
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(saved[name], tensor))
