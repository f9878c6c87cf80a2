"""Checkpoints: the whole state of a run is written to a folder, and read from it again."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.model_card import write_model_card
from paco_grpo.distributed.fsdp2 import save_transformer
from paco_grpo.distributed.processes import any_process, full_tensor
from paco_grpo.options import RunOptions
from paco_grpo.policies.adapters import log_adapter, save_diffusers, save_peft

if TYPE_CHECKING:
    from paco_grpo.training.state import TrainState

logger = logging.getLogger(__name__)

_FORMAT = 3  # of trainer.json and the files beside it


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
        if self.saved_epoch != self.state.epoch:
            self.save()
            self.saved_epoch = self.state.epoch

    def save(self, name: str | None = None) -> Path:
        """Write a checkpoint into a hidden folder that is renamed when it is complete.

        A collective operation. Without ``name``, it is named by the epoch, and checkpoints beyond
        the limit are removed. When one process could not write, every process raises a
        ``CheckpointError``; the earlier checkpoints are intact.
        """
        final = self.root / (name or files.checkpoint_name(self.state.epoch))
        partial = self.root / f".{final.name}.partial"
        is_main = self.accelerator.is_main_process
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        self._write_state(partial / "state", final)
        with self._all_succeed(final):
            self._write_average(partial)
        with self._all_succeed(final):
            if is_main:
                files.commit(partial, final)
        if name is None and is_main:
            files.prune(self.root, self.options.num_checkpoint_limit)
        logger.info("saved %s", final)
        return final

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
    def _all_succeed(self, final: Path) -> Iterator[None]:
        """A ``CheckpointError`` on every process if one could not write in the block.

        A full disk on one process must not leave the others in a collective operation.
        """
        problem = None
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:  # the last one of torch.save
            problem = error
        if any_process(self.accelerator, problem is not None):
            raise files.CheckpointError(
                f"checkpoint {final} could not be written "
                f"({problem or 'another process failed'}); earlier ones are intact"
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
            if part == "ema" and not path.is_file():
                logger.info("the average of the weights starts here: it was off before")
                path = folder / "state" / "trainable.safetensors"
            files.load_into(path, tensors)
        moments = torch.load(folder / "state" / "optimizer.pt", weights_only=True)
        if moments:
            self._load_moments(moments["state"])
        state.epoch = numbers["epoch"]
        state.optimizer_steps = numbers["step"]
        state.train_seconds = numbers["train_seconds"]
        state.must_recompute = numbers["recompute_old"]
        if folder.parent == self.root:
            self.saved_epoch = state.epoch
        if self.options.use_lora:
            log_adapter(state.policy, str(folder))

    def _load_moments(self, moments: Mapping[str, Any]) -> None:
        """The inverse of ``_moments``; the optimizer keeps its own settings."""
        optimizer = self.state.optimizer
        transformer = self.state.policy.transformer
        # Weights that never had a gradient have no state.
        options = StateDictOptions(full_state_dict=True, strict=False)
        (group,) = optimizer.param_groups
        settings = {name: value for name, value in group.items() if name != "params"}
        groups = [settings | {"params": list(moments)}]
        set_optimizer_state_dict(
            transformer, optimizer, {"state": moments, "param_groups": groups}, options=options
        )

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


def read_numbers(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint."""
    numbers = json.loads((folder / "state" / "trainer.json").read_bytes())
    if numbers.get("format") != _FORMAT:
        raise files.CheckpointError(f"{folder} was saved by another version of PaCo-GRPO")
    return numbers
