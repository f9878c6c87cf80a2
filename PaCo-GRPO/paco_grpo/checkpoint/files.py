"""The run's folder: who may write to it, its checkpoints by epoch, and their weights."""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

from paco_grpo.distributed.processes import shard_like
from paco_judge.errors import UserError
from paco_judge.files import locked, sync_folder


class CheckpointError(UserError):
    """A checkpoint could not be written or read."""


class RunFolder:
    """The folder of one run. The main process claims it, so that two trainers never share one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = ExitStack()

    def claim(self) -> None:
        """Make the folder and lock it; a ``UserError`` if another trainer has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(locked(self.path))

    def release(self) -> None:
        """Let another trainer have the folder."""
        self._lock.close()


# --- checkpoints by epoch -----------------------------------------------------------------------


def checkpoint_name(epoch: int) -> str:
    """Folder name after ``epoch`` epochs."""
    return f"epoch_{epoch:04d}"


def _by_epoch(folder: Path) -> list[tuple[int, Path]]:
    """Epoch and path of what ``checkpoint_name`` named, oldest first.

    Not of others: ``epoch_0001_keep`` is the user's own.
    """
    named = []
    for path in folder.glob("epoch_*"):
        name = re.fullmatch(r"epoch_(\d+)", path.name)
        if name:
            named.append((int(name[1]), path))
    return sorted(named)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in ``folder``, oldest first. One gets its name only when it is whole."""
    return [path for _, path in _by_epoch(folder) if (path / "state").is_dir()]


def find_checkpoint(resume_from: str, run_dir: Path) -> Path | None:
    """The checkpoint that ``config.resume_from`` means.

    It is ``latest`` (in ``run_dir``), or the path of a checkpoint or run. Returns None for
    ``latest`` when this run has no checkpoint yet; another path without one is a
    ``CheckpointError``.
    """
    path = run_dir
    if resume_from != "latest":
        path = Path(resume_from).expanduser().absolute()
    if (path / "state").is_dir():
        return path
    checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not checkpoints and resume_from != "latest":
        raise CheckpointError(f"config.resume_from={resume_from!r} holds no checkpoint")
    return checkpoints[-1] if checkpoints else None


def commit(partial: Path, final: Path) -> None:
    """Sync the folder to disk and give it its name: a checkpoint appears when it is whole."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            sync_folder(path)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    sync_folder(final.parent)


def archive_superseded(folder: Path, epoch: int) -> None:
    """Rename what is later than ``epoch``, where a run resumes.

    ``latest`` must not mean the abandoned course.
    """
    for number, path in _by_epoch(folder):
        if number > epoch:
            target = path.with_name(f"replaced_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)


def prune(root: Path, limit: int) -> None:
    """Remove the oldest checkpoints beyond ``limit``, and what was killed while it was written."""
    for path in (*list_checkpoints(root)[:-limit], *root.glob(".*.partial")):
        shutil.rmtree(path, ignore_errors=True)


@torch.no_grad()
def load_into(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into ``tensors``, sharded or not."""
    saved = load_file(path)
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if saved_shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise CheckpointError(f"{path} holds other weights than this run trains")
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(saved[name], tensor))
