"""Checkpoints: the whole state of a run, written atomically; tensors as safetensors, the rest as JSON."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from paco_grpo.distributed.collectives import full_tensor, shard_like

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and says what is still there."""


def checkpoint_name(epoch: int) -> str:
    """Folder name of the checkpoint after ``epoch`` epochs."""
    return f"epoch_{epoch:04d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in ``folder``, oldest first (by epoch)."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.glob("epoch_*") if (path / "state" / "trainer.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("epoch_")))


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
    if resume_from == "latest":
        found = list_checkpoints(run_dir / "checkpoints")
        return found[-1] if found else None
    path = Path(resume_from).expanduser()
    if (path / "state" / "trainer.json").is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise CheckpointError(
            f"config.resume_from={resume_from!r} holds no checkpoint (a folder with state/trainer.json); "
            f"use 'latest' or one of {run_dir / 'checkpoints'}"
        )
    return found[-1]


class CheckpointWriter:
    """Writes one checkpoint into a hidden folder and renames it when complete.

    A crash or a full disk in between leaves the earlier checkpoints intact.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.final = root / name
        self.folder = root / f".{name}.partial"

    def begin(self) -> None:
        """Make an empty partial folder (main process)."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "state").mkdir(parents=True)

    def commit(self) -> None:
        """Sync to disk and rename the folder to its final name (main process)."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if self.final.exists():
            # A resumed run writes an epoch again; a rename cannot replace a folder, so the old one moves first.
            aside = self.final.with_name(f".{self.final.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            self.final.rename(aside)
            self.folder.rename(self.final)
            shutil.rmtree(aside)
        else:
            self.folder.rename(self.final)
        _sync_folder(self.final.parent)

    def discard(self) -> None:
        """Remove what was written so far (main process)."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Sync the entries of ``folder`` to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def archive_superseded(folder: Path, epoch: int) -> list[Path]:
    """Rename what a run resumed after ``epoch`` will write again, so that 'latest' never means the abandoned course.

    Args:
        folder: Folder of checkpoints or evaluations, named by epoch.
        epoch: The last one that stays.

    Returns:
        The new paths ``replaced_epoch_NNNN``.
    """
    moved = []
    for path in sorted(folder.glob("epoch_*")):
        if int(path.name.removeprefix("epoch_")) > epoch:
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
    """Plain values.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error}); resume from an older one") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises its own exception type, which is not exported stably
        raise CheckpointError(f"checkpoint file {path} cannot be read ({error}); resume from an older one") from error


@torch.no_grad()
def load_parameters(path: Path, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Copy saved weights into ``parameters``.

    Raises:
        CheckpointError: Names or shapes differ.
    """
    saved = load_tensors(path)
    if {n: tuple(t.shape) for n, t in saved.items()} != {n: tuple(p.shape) for n, p in parameters.items()}:
        raise CheckpointError(
            f"{path} holds other weights than this run trains; did config.train.lora_rank or the model change?"
        )
    for name, parameter in parameters.items():
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
    """What ``save_optimizer`` wrote, tensors whole and on the CPU.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    rest = load_json(folder / "optimizer.json")
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**load_tensors(folder / "optimizer.safetensors"), **rest["numbers"]}.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = rest["param_groups"]
    for group in groups:
        group["betas"] = tuple(group["betas"])
    return {"state": state, "param_groups": groups}


@dataclass(frozen=True)
class RngState:
    """State of a process's global random generators (our own sampling never uses them, a user's reward may)."""

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, Any]


def capture_rng() -> RngState:
    """The current state of the generators of torch (CPU and GPUs), NumPy and Python."""
    tensors = {"torch": torch.get_rng_state()}
    for index, state in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []):
        tensors[f"cuda.{index}"] = state
    name, keys, position, has_gauss, cached = np.random.get_state()
    version, words, gauss = random.getstate()
    numbers = {
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "python": [version, list(words), gauss],
    }
    return RngState(tensors, numbers)


def save_rng(folder: Path, process: int, state: RngState) -> None:
    """Write the generators of one process."""
    save_tensors(folder / f"rng_{process}.safetensors", state.tensors)
    save_json(folder / f"rng_{process}.json", state.numbers)


def load_rng(folder: Path, process: int) -> None:
    """Restore the generators; a process that did not exist when the checkpoint was written keeps its own."""
    if not (folder / f"rng_{process}.json").is_file():
        logger.warning("the checkpoint was written by fewer processes; process %d keeps its own generators", process)
        return
    tensors = load_tensors(folder / f"rng_{process}.safetensors")
    torch.set_rng_state(tensors.pop("torch"))
    for name, state in tensors.items():
        index = int(name.removeprefix("cuda."))
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)
    numbers = load_json(folder / f"rng_{process}.json")
    name, keys, position, has_gauss, cached = numbers["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = numbers["python"]
    random.setstate((version, tuple(words), gauss))
