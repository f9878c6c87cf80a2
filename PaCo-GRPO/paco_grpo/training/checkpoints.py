"""What a run saves: checkpoints by epoch, and the whole state in each of them."""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from paco_grpo.distributed import any_process, full_tensor, shard_like
from paco_grpo.options import RunOptions
from paco_grpo.policies.adapters import log_adapter, save_diffusers, save_peft
from paco_grpo.training.model_card import write_model_card
from paco_grpo.training.state import TrainState
from paco_judge.errors import UserError
from paco_judge.files import sync_folder

logger = logging.getLogger(__name__)

_FORMAT = 3  # of trainer.json and the files beside it


class CheckpointError(UserError):
    """There is no such checkpoint, it cannot be written, or it is of another run or version."""


# --- checkpoints by epoch -----------------------------------------------------------------------


def checkpoint_name(epoch: int) -> str:
    """Folder name after ``epoch`` epochs."""
    return f"epoch_{epoch:04d}"


def epoch_of(path: Path) -> int:
    """The inverse of ``checkpoint_name``, for a path."""
    return int(path.name.removeprefix("epoch_"))


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
    ``latest`` when this run has no checkpoint yet.

    Raises:
        CheckpointError: Another path holds none, or the checkpoint lies outside of its run.
    """
    is_latest = resume_from == "latest"
    # A link, such as ``best``, does not lie in the run.
    path = run_dir if is_latest else Path(os.path.realpath(resume_from))
    checkpoints = []
    if os.path.isdir(path):  # False where the name is too long
        checkpoints = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
        if (path / "state").is_dir():
            checkpoints = [path]
    if not checkpoints and is_latest:
        return None
    if not checkpoints:
        raise CheckpointError(f"config.resume_from={resume_from!r} holds no checkpoint")
    run = checkpoints[-1].parents[1]
    for name in ("config.yaml", "plan.json"):  # what it belongs to
        if not (run / name).is_file():
            raise CheckpointError(
                f"{checkpoints[-1]} lies outside of its run: {run} has no {name}. Copy the run's "
                "config.yaml and plan.json there, or begin another run with its adapter "
                "(config.train.lora_path)"
            )
    return checkpoints[-1]


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


def prune(root: Path, limit: int, best: int | None = None) -> None:
    """Remove the oldest checkpoints beyond ``limit``, and what was killed while it was written.

    Not the one after ``best`` epochs.
    """
    for path in (*list_checkpoints(root)[:-limit], *root.glob(".*.partial")):
        if best is None or path.name != checkpoint_name(best):
            shutil.rmtree(path, ignore_errors=True)


def link(path: Path, target: Path) -> None:
    """Let ``path`` be a relative symbolic link to ``target``; a reader finds the old or this one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(target, path.parent))
    beside.replace(path)


@torch.no_grad()
def load_into(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy saved weights into ``tensors``, sharded or not."""
    saved = load_file(path)
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    if saved_shapes != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise CheckpointError(f"{path} holds other weights than this run trains")
    for name, tensor in tensors.items():
        tensor.copy_(shard_like(saved[name], tensor))


@torch.no_grad()
def copy_tensors(tensors: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy ``tensors`` into ``targets``, which have other names in the same order."""
    for tensor, target in zip(tensors.values(), targets.values(), strict=True):
        target.copy_(tensor)


# --- the state ------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of the run in ``folder``."""

    def __init__(self, folder: Path, options: RunOptions, state: TrainState) -> None:
        self.root = folder / "checkpoints"
        self.options = options
        self.state = state
        self.accelerator = state.strategy.accelerator
        self.saved_epoch: int | None = None  # of the newest one that this process wrote or read
        self.best: int | None = None  # the epoch whose checkpoint is not pruned
        self.link = folder / "best"  # to that checkpoint

    def save_epoch(self) -> None:
        """Save the state after the current epoch, unless that was done."""
        if self.saved_epoch != self.state.epoch:
            self.save()
            self.saved_epoch = self.state.epoch

    def save(self, name: str | None = None) -> Path:
        """Write a checkpoint into a hidden folder that is renamed when it is complete.

        A collective operation. Without ``name``, it is named by the epoch, and checkpoints beyond
        the limit are removed. When the main process cannot write, every process raises a
        ``CheckpointError``; the earlier checkpoints are intact.
        """
        final = self.root / (name or checkpoint_name(self.state.epoch))
        partial = self.root / f".{final.name}.partial"
        is_main = self.accelerator.is_main_process
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        self._write_state(partial / "state", final)
        with self._all_succeed(final):
            self._write_average(partial)
        with self._all_succeed(final):
            if is_main:
                commit(partial, final)
        if name is None and is_main:
            prune(self.root, self.options.num_checkpoint_limit, self.best)
        logger.info("saved %s", final)
        return final

    def mark_best(self, epoch: int | None) -> None:
        """Keep the checkpoint after ``epoch`` and link it as ``best``, in place of an earlier one.

        Without a checkpoint of it (the weights before training have none), there is no link. Done
        on the main process.
        """
        self.best = epoch
        target = self.root / checkpoint_name(epoch or 0)
        try:
            if epoch is not None and target.is_dir():
                link(self.link, target)
            elif self.link.is_symlink():
                self.link.unlink()
        except OSError as error:  # such as a file system without links
            logger.warning(
                "%s cannot link to the best checkpoint, %s: %s", self.link, target, error
            )
        prune(self.root, self.options.num_checkpoint_limit, self.best)

    def _write_state(self, folder: Path, final: Path) -> None:
        """Everything that a resumed run needs. Sharded tensors are gathered part by part."""
        state = self.state
        is_main = self.accelerator.is_main_process
        for part, tensors in state.weights().items():
            whole = {}
            for name, tensor in tensors.items():
                value = full_tensor(tensor)
                if is_main:
                    whole[name] = value.cpu().contiguous().clone()
            with self._all_succeed(final):
                if is_main:
                    folder.mkdir(parents=True, exist_ok=True)
                    save_file(whole, folder / f"{part}.safetensors")
        # It is empty before the first step, where torch would fill it.
        moments = self._moments() if state.optimizer_steps else {}
        numbers = {
            "format": _FORMAT,
            "epoch": state.epoch,
            "train_seconds": state.train_seconds,
            "step": state.optimizer_steps,
            "recompute_old": state.must_recompute,
        }
        with self._all_succeed(final):
            if is_main:
                torch.save(moments, folder / "optimizer.pt")
                (folder / "trainer.json").write_text(json.dumps(numbers, indent=1))

    def _moments(self) -> dict[str, Any]:
        """The state of the optimizer by the names of the weights, on the CPU of the main process.

        Learning rate, betas and the like come from the options.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        transformer = self.state.policy.transformer
        saved = get_optimizer_state_dict(transformer, self.state.optimizer, options=options)
        return {"state": saved.get("state", {})}  # other processes have none

    @contextlib.contextmanager
    def _all_succeed(self, final: Path) -> Generator[None]:
        """A ``CheckpointError`` on every process if the main one could not write in the block.

        Others would wait for it in the next collective operation.
        """
        problem = None
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # the last one of torch.save
            problem = error
        if any_process(self.accelerator, problem is not None):
            raise CheckpointError(
                f"{final} could not be written ({problem or 'on the main process'}); "
                "earlier ones are intact"
            ) from problem

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote.

        Raises:
            CheckpointError: It was saved by another version, or holds other weights.
        """
        state = self.state
        numbers = read_numbers(folder)
        for part, tensors in state.weights().items():
            path = folder / "state" / f"{part}.safetensors"
            if part == "trainable" or path.is_file():
                load_into(path, tensors)
            else:  # another objective, or option, had no use for it
                logger.info("%s: this copy of the trained weights starts here", part)
                copy_tensors(state.parameters, tensors)
        moments = torch.load(folder / "state" / "optimizer.pt", weights_only=True)
        if moments:
            self._load_moments(moments["state"])
        state.epoch = numbers["epoch"]
        state.optimizer_steps = numbers["step"]
        state.train_seconds = numbers["train_seconds"]
        state.must_recompute = numbers["recompute_old"]
        if self.root.is_dir() and self.root.samefile(folder.parent):
            self.saved_epoch = state.epoch
        if self.options.use_lora:
            log_adapter(state.policy, str(folder))

    def _load_moments(self, moments: dict[str, Any]) -> None:
        """The inverse of ``_moments``; the optimizer keeps its own settings."""
        optimizer = self.state.optimizer
        transformer = self.state.policy.transformer
        # Weights that never had a gradient have no state.
        options = StateDictOptions(full_state_dict=True, strict=False)
        (group,) = optimizer.param_groups
        saved = {"state": moments, "param_groups": [dict(group, params=list(moments))]}
        set_optimizer_state_dict(transformer, optimizer, saved, options=options)

    def _write_average(self, folder: Path) -> None:
        """Write the averaged weights in the formats of diffusers and PEFT."""
        state = self.state
        policy = state.policy
        is_main = self.accelerator.is_main_process
        if is_main and state.ema and 0 < state.optimizer_steps < state.ema.update_interval:
            logger.warning(
                "after %d optimizer steps, the saved weights are still those of the start: their "
                "average first moves at step %d (config.train.ema_update_interval)",
                state.optimizer_steps,
                state.ema.update_interval,
            )
        with state.averaged():
            if not self.options.use_lora:
                save_transformer(policy.transformer, folder / "transformer", is_main)
            elif is_main:
                save_peft(policy, folder / "adapter")
                save_diffusers(policy, folder / "diffusers")
                for name in ("adapter", "diffusers"):
                    write_model_card(folder / name, self.options, policy, self.state.epoch)


def read_numbers(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint."""
    numbers = json.loads((folder / "state" / "trainer.json").read_bytes())
    if numbers.get("format") != _FORMAT:
        raise CheckpointError(f"{folder} was saved by another version of PaCo-GRPO")
    return numbers


def save_transformer(transformer: ModelMixin, folder: Path, write: bool) -> None:
    """Write ``transformer`` as diffusers reads it; without ``write``, only help to gather it."""
    if not isinstance(transformer, FSDPModule):
        if write:
            transformer.save_pretrained(folder)
        return
    weights = {}
    for name, tensor in transformer.state_dict().items():
        value = full_tensor(tensor)
        if write:
            weights[name] = value.cpu()
    if not write:
        return
    # fully_shard prepends its own class to the model's; the copy that is written has the model's
    # class.
    (model_class,) = (base for base in type(transformer).__bases__ if base is not FSDPModule)
    with torch.device("meta"):
        copy = model_class.from_config(transformer.config)
    copy.load_state_dict(weights, assign=True)
    copy.save_pretrained(folder)
