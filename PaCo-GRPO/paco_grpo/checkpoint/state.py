"""Checkpoints: the whole state of a run is written to a folder, and read from it again."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor

from paco_grpo.atomic import remedy
from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.model_card import write_model_card
from paco_grpo.distributed.fsdp2 import save_transformer
from paco_grpo.distributed.processes import any_process, shard_like
from paco_grpo.options import RunOptions
from paco_grpo.policies.adapters import log_adapter, save_diffusers, save_peft
from paco_judge.json_io import parse_object

if TYPE_CHECKING:
    from paco_grpo.training.state import TrainState

logger = logging.getLogger(__name__)

_FORMAT = 2  # of trainer.json; since 2, a checkpoint has hashes


class Checkpoints:
    """The checkpoints of the run in ``folder``."""

    def __init__(self, folder: Path, options: RunOptions, state: TrainState) -> None:
        self.root = folder / "checkpoints"
        self.options = options
        self.state = state
        self.accelerator = state.strategy.accelerator
        self.saved_epoch: int | None = None  # of the newest one that this process wrote or read

    def save_epoch(self) -> None:
        """Save the state after the current epoch, unless that was done."""
        epoch = self.state.epoch
        if self.saved_epoch == epoch:
            return
        if self.saved_epoch is not None and not self.root.is_dir():
            logger.warning("%s was removed, and earlier checkpoints with it", self.root)
        self.save()
        self.saved_epoch = epoch

    def save(self, name: str | None = None) -> Path:
        """Write a checkpoint into a hidden folder that is renamed when it is complete.

        A collective operation. Without ``name``, it is named by the epoch, and checkpoints beyond
        the limit are removed. When one process could not write, every process raises a
        ``CheckpointError``; the earlier checkpoints are intact.
        """
        final = self.root / (name or files.checkpoint_name(self.state.epoch))
        partial = self.root / f".{final.name}.partial"
        is_main = self.accelerator.is_main_process
        try:
            self._write(partial, final)
        except files.CheckpointError:
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if name is None and is_main:
            files.prune(self.root, self.options.num_checkpoint_limit)
        logger.info("saved %s", final)
        return final

    def _write(self, partial: Path, final: Path) -> None:
        state = self.state
        is_main = self.accelerator.is_main_process
        with self._all_succeed(final):
            if is_main:
                files.begin(partial)
        tensors = state.weights() | {"optimizer": _moments(state.optimizer)}
        for part, entries in tensors.items():
            with self._all_succeed(final):
                files.save_tensors(partial / "state" / f"{part}.safetensors", entries, is_main)
        with self._all_succeed(final):
            self._write_average(partial)
        with self._all_succeed(final):
            if is_main:
                text = json.dumps(_numbers(state), indent=1)
                (partial / "state" / "trainer.json").write_text(text, encoding="utf-8")
                files.write_hashes(partial / "state")
                files.commit(partial, final)

    @contextlib.contextmanager
    def _all_succeed(self, final: Path) -> Iterator[None]:
        """A ``CheckpointError`` on every process if one could not write in the block.

        A full disk on one process must not leave the others in a collective operation.
        """
        problem = None
        try:
            yield
        except (OSError, SafetensorError) as error:
            problem = error
        if not any_process(self.accelerator, problem is not None):
            return
        message = (
            f"checkpoint {final} could not be written ({problem or 'another process failed'}); "
            "earlier ones are intact"
        )
        if problem is not None and (advice := remedy(problem)):
            message += f". To mend it: {advice}"
        raise files.CheckpointError(message) from problem

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, from files that ``verify`` has seen.

        What is missing, not finite or of another model is a ``CheckpointError`` that names an
        earlier checkpoint.
        """
        state = self.state
        try:
            numbers = read_numbers(folder)
            for part, tensors in state.weights().items():
                files.load_into(folder / "state" / f"{part}.safetensors", tensors)
            moments = files.load_finite(folder / "state" / "optimizer.safetensors")
            _load_moments(state.optimizer, moments, numbers["step"])
        except Exception as error:
            raise _unusable(folder, error) from error
        state.epoch = numbers["epoch"]
        state.optimizer_steps = numbers["step"]
        state.train_seconds = numbers["train_seconds"]
        state.must_recompute = numbers["recompute_old"]
        if folder.parent == self.root:
            self.saved_epoch = state.epoch
        if self.options.use_lora:
            log_adapter(state.policy, str(folder))

    def _write_average(self, folder: Path) -> None:
        """Write the averaged weights in the formats of diffusers and PEFT."""
        policy = self.state.policy
        is_main = self.accelerator.is_main_process
        with self.state.averaged():
            if not self.options.use_lora:
                save_transformer(policy.transformer, folder / "transformer", is_main)
            elif is_main:
                save_peft(policy, folder / "adapter")
                save_diffusers(policy, folder / "diffusers")
                for name in ("adapter", "diffusers"):
                    write_model_card(folder / name, self.options, policy, self.state.epoch)


# --- what is in a checkpoint --------------------------------------------------------------------


def verify(folder: Path) -> None:
    """Raise a ``CheckpointError`` if a file of a checkpoint's state is not as it was saved.

    All files are read. Checkpoints of earlier versions have no hashes: their tensors are only
    compared in name and shape, and must be finite.
    """
    try:
        numbers = read_numbers(folder)
        has_hashes = files.check_hashes(folder / "state")
        if not has_hashes and numbers.get("format", 1) >= _FORMAT:
            raise ValueError(f"{files.HASHES_FILE} is missing")
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    if not has_hashes:
        logger.warning(
            "%s was saved by an earlier version, without hashes: a damaged weight that is finite "
            "is not noticed",
            folder,
        )


def read_numbers(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint.

    A value that is missing, of another kind or of another epoch is a ``ValueError``.
    """
    path = folder / "state" / "trainer.json"
    if not path.is_file():
        raise ValueError("trainer.json is missing")
    numbers = parse_object(path.read_bytes())
    sampler = numbers.get("sampler")
    if not isinstance(sampler, dict):
        sampler = {}
    seconds = numbers.get("train_seconds")
    counts = (numbers.get("epoch"), numbers.get("step"), sampler.get("epoch"), sampler.get("seed"))
    are_counts = all(type(count) is int and count >= 0 for count in counts)
    is_time = type(seconds) in (int, float) and math.isfinite(seconds) and seconds >= 0
    is_choice = isinstance(numbers.get("recompute_old", "missing"), bool | None)
    if not (are_counts and is_time and is_choice):
        raise ValueError("trainer.json does not hold the numbers of a run")
    epochs = {numbers["epoch"], sampler["epoch"]}
    if (epoch := files.epoch_of(folder)) is not None:
        epochs.add(epoch)
    if len(epochs) > 1:
        raise ValueError(f"folder, trainer.json and sampler are of different epochs: {epochs}")
    return numbers


def _numbers(state: TrainState) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "epoch": state.epoch,
        "train_seconds": state.train_seconds,
        "step": state.optimizer_steps,
        "recompute_old": state.must_recompute,
        "sampler": {"epoch": state.epoch, "seed": state.sampler.seed},
    }


def _unusable(folder: Path, error: Exception) -> files.CheckpointError:
    """The error for a checkpoint that cannot be loaded, with the newest one before it that can."""
    text = (
        f"cannot resume from {folder}: it is damaged, or of another model or version "
        f"({type(error).__name__}: {error})"
    )
    epoch = files.epoch_of(folder)
    if epoch is not None:
        for earlier in reversed(files.list_checkpoints(folder.parent)):
            if files.epoch_of(earlier) < epoch and _is_whole(earlier):
                text += f". The newest good one before it: --config.resume_from={earlier}"
                break
    return files.CheckpointError(text)


def _is_whole(folder: Path) -> bool:
    try:
        read_numbers(folder)
        files.check_hashes(folder / "state")
    except (OSError, ValueError):
        return False
    return True


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of each parameter as ``number.entry``.

    Learning rate, betas and the like come from the options.
    """
    moments = {}
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        for entry, value in optimizer.state.get(parameter, {}).items():
            moments[f"{number}.{entry}"] = torch.as_tensor(value)
    return moments


def _load_moments(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, torch.Tensor], step: int
) -> None:
    """The inverse of ``_moments``, whose tensors are whole and on the CPU."""
    parameters = optimizer.param_groups[0]["params"]
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in saved.items():
        number, entry = key.split(".", 1)
        like = parameters[int(number)]
        if value.shape == like.shape:
            value = shard_like(value, like)
        elif value.dtype == torch.int64:  # a step that the optimizer counts in Python
            value = value.item()
        state[int(number)][entry] = value
    # A sharded parameter may never have had a gradient; the gradients of others are at least zero.
    expected = [n for n, parameter in enumerate(parameters) if not isinstance(parameter, DTensor)]
    if step > 0 and not set(expected) <= set(state):
        raise ValueError("optimizer.safetensors lacks the moments of some parameters")
    if isinstance(optimizer, torch.optim.AdamW):
        for number, entries in state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in entries or entries[name].shape != parameters[number].shape:
                    raise ValueError(f"optimizer.safetensors lacks {number}.{name}")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
