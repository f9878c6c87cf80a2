"""Checkpoints on disk: folders by epoch that appear when they are whole; tensors as safetensors, the rest as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paco_grpo.distributed.processes import full_tensor, shard_like

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and says what is still there."""


def checkpoint_name(epoch: int) -> str:
    """Folder name of the checkpoint after ``epoch`` epochs."""
    return f"epoch_{epoch:04d}"


def _by_epoch(folder: Path) -> list[tuple[int, Path]]:
    """Epoch and path of what ``checkpoint_name`` named, oldest first; ``epoch_0001_keep`` is the user's own."""
    named = [(re.fullmatch(r"epoch_(\d+)", path.name), path) for path in folder.glob("epoch_*")]
    return sorted((int(name[1]), path) for name, path in named if name)


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in ``folder``, oldest first (by epoch)."""
    return [path for _, path in _by_epoch(folder) if (path / "state" / "trainer.json").is_file()]


def find_checkpoint(resume_from: str, run_dir: Path) -> Path | None:
    """The checkpoint that ``config.resume_from`` means.

    Args:
        resume_from: ``latest`` (in this run's folder), a checkpoint folder, or a run folder.
        run_dir: This run's folder.

    Returns:
        None for ``latest`` when this run has no checkpoint yet: it then starts from the beginning.

    Raises:
        CheckpointError: A path that holds no checkpoint.
    """
    path = run_dir if resume_from == "latest" else Path(resume_from).expanduser()
    if (path / "state" / "trainer.json").is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found and resume_from != "latest":
        raise CheckpointError(
            f"config.resume_from={resume_from!r} holds no checkpoint (a folder with state/trainer.json); "
            f"use 'latest' or one of {run_dir / 'checkpoints'}"
        )
    return found[-1] if found else None


class CheckpointWriter:
    """Writes one checkpoint into a hidden folder and renames it when complete.

    A crash or a full disk in between leaves the earlier checkpoints intact.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.final = root / name
        self.folder = root / f".{name}.partial"

    def begin(self) -> None:
        """Make an empty partial folder (main process)."""
        self.discard()
        (self.folder / "state").mkdir(parents=True)

    def commit(self) -> None:
        """Sync to disk and rename the folder to its final name (main process)."""
        for path in filter(Path.is_file, self.folder.rglob("*")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        # A resumed run writes an epoch again; a rename cannot replace a folder, so the old one moves first.
        aside = self.final.with_name(f".{self.final.name}.old")
        if self.final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self.final.rename(aside)
        self.folder.rename(self.final)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written so far (main process)."""
        shutil.rmtree(self.folder, ignore_errors=True)


def archive_superseded(folder: Path, epoch: int) -> list[Path]:
    """Rename what a run resumed after ``epoch`` will write again, so that 'latest' never means the abandoned course.

    Args:
        folder: Folder of checkpoints or evaluations, named by epoch.
        epoch: The last one that stays.

    Returns:
        The new paths ``replaced_epoch_NNNN``.
    """
    moved = []
    for number, path in _by_epoch(folder):
        if number > epoch:
            target = path.with_name(f"replaced_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    return moved


def prune(root: Path, limit: int) -> None:
    """Remove the oldest checkpoints beyond ``limit``."""
    for path in list_checkpoints(root)[:-limit]:
        logger.info("removing old checkpoint %s (config.num_checkpoint_limit=%d)", path.name, limit)
        shutil.rmtree(path)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], write: bool = True) -> None:
    """Write tensors by name as safetensors.

    Sharded tensors are gathered: all processes call it, those with ``write`` False write nothing.
    """
    kept = {}
    for name, tensor in tensors.items():
        value = full_tensor(tensor)
        if write:
            kept[name] = value.cpu().contiguous().clone()
    if write:
        save_file(kept, path)


def save_json(path: Path, value: Any) -> None:
    """Plain values as JSON."""
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def load_json(path: Path) -> Any:
    """Plain values."""
    return json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Any error of reading ``path``, or of using what it holds, becomes a CheckpointError that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or cannot be read ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error


@torch.no_grad()
def load_parameters(path: Path, parameters: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into ``parameters``, sharded or not.

    Raises:
        CheckpointError: Names or shapes differ, or a value is not finite.
    """
    with reading(path):
        saved = load_file(path)
    if {n: tuple(t.shape) for n, t in saved.items()} != {n: tuple(p.shape) for n, p in parameters.items()}:
        raise CheckpointError(
            f"{path} holds other weights than this run trains; did config.train.lora_rank or the model change?"
        )
    for name, parameter in parameters.items():
        if not saved[name].isfinite().all():
            raise CheckpointError(f"{path}: {name} is not finite; resume from an earlier checkpoint")
        parameter.copy_(shard_like(saved[name], parameter))


def save_optimizer(folder: Path, state: Mapping[str, Any], write: bool = True) -> None:
    """Write a ``state_dict`` of an optimizer, tensors apart from numbers; ``write`` as in ``save_tensors``."""
    tensors, numbers = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, torch.Tensor) else numbers)[f"{index}.{name}"] = value
    save_tensors(folder / "optimizer.safetensors", tensors, write)
    if write:
        save_json(folder / "optimizer.json", {"numbers": numbers, "param_groups": state["param_groups"]})


def load_optimizer(folder: Path) -> dict[str, Any]:
    """What ``save_optimizer`` wrote, tensors whole and on the CPU."""
    rest = load_json(folder / "optimizer.json")
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_file(folder / "optimizer.safetensors"), **rest["numbers"]}.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = [group | {"betas": tuple(group["betas"])} for group in rest["param_groups"]]
    return {"state": state, "param_groups": groups}
