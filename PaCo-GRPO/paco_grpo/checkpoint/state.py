"""The whole state of a run: what training changes, and how it is saved to a checkpoint and loaded from it."""

import contextlib
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.model_card import write_model_card
from paco_grpo.data.sampler import GroupSampler
from paco_grpo.distributed.fsdp2 import save_transformer
from paco_grpo.distributed.processes import Replicated, any_process, shard_like
from paco_grpo.options import RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.lora import save_diffusers, save_peft

logger = logging.getLogger(__name__)

_NUMBERS = ("epoch", "train_seconds", "step", "recompute_old")  # of ``TrainState``, in trainer.json


class EMA:
    """Shadow copies of parameters: shadow ← d·shadow + (1 − d)·weight, d = min((1+s)/(10+s), decay).

    s counts optimizer steps; the average moves at every ``update_interval``-th of them (docs/method.md §6).
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], decay: float, update_interval: int
    ) -> None:
        self.parameters = dict(parameters)
        self.decay, self.update_interval = decay, update_interval
        self.shadow = {name: p.detach().clone().float() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average after optimizer step number ``step`` (the first is 1)."""
        if step % self.update_interval == 0:
            decay = min((1 + step) / (10 + step), self.decay)
            for name, parameter in self.parameters.items():
                self.shadow[name].lerp_(parameter.detach().float(), 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average inside the block, and exactly their former values after it."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._copy(self.shadow)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


@dataclass
class TrainState:
    """Everything that training changes."""

    policy: Policy
    parameters: Mapping[str, torch.nn.Parameter]  # trainable, by name
    snapshots: Mapping[
        str, Mapping[str, torch.nn.Parameter]
    ]  # adapter (``Objective.snapshots``) → its parameters
    ema: EMA | None  # of ``parameters``
    optimizer: torch.optim.Optimizer  # over ``parameters``
    strategy: Replicated  # how all this is spread over the processes
    sampler: GroupSampler
    step: int = 0  # optimizer steps taken
    recompute_old: bool | None = (
        None  # old log-probabilities before training; None = not decided yet
    )
    epoch: int = 0  # finished epochs
    train_seconds: float = 0.0  # in epochs, without evaluations and checkpoints

    def averaged(self) -> contextlib.AbstractContextManager:
        """The averaged weights are in place inside the block."""
        return self.ema.applied() if self.ema else contextlib.nullcontext()


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state of each parameter as ``number.entry``; learning rate, betas … come from the options."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}.{entry}": torch.as_tensor(value)
        for number, parameter in enumerate(parameters)
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def _load_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, torch.Tensor]) -> None:
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
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


class Checkpoints:
    """The checkpoints of the run in ``folder``."""

    def __init__(self, folder: Path, options: RunOptions, state: TrainState) -> None:
        self.root, self.options, self.state = folder / "checkpoints", options, state
        self.accelerator = state.strategy.accelerator

    def save(self, name: str | None = None) -> Path:
        """Write a checkpoint into a hidden folder that is renamed when complete; a collective operation.

        Without ``name``, it is named by the epoch, and checkpoints beyond the limit are removed. When one process could
        not write, every process raises a ``CheckpointError``; the earlier checkpoints are intact.
        """
        state, is_main = self.state, self.accelerator.is_main_process
        final = self.root / (name or files.checkpoint_name(state.epoch))
        folder = self.root / f".{final.name}.partial"
        numbers = {each: getattr(state, each) for each in _NUMBERS} | {
            "sampler": state.sampler.state_dict()
        }
        text = json.dumps(numbers, indent=1)
        steps = [
            lambda: is_main and files.begin(folder),
            *(
                partial(
                    files.save_tensors, folder / "state" / f"{part}.safetensors", tensors, is_main
                )
                for part, tensors in (
                    self._weights() | {"optimizer": _moments(state.optimizer)}
                ).items()
            ),
            lambda: self._write_average(folder),
            lambda: (
                is_main and (folder / "state" / "trainer.json").write_text(text, encoding="utf-8")
            ),
            lambda: is_main and files.commit(folder, final),
        ]
        for step in (
            steps
        ):  # a full disk on one process must not leave the others in a collective operation
            problem = None
            try:
                step()
            except (OSError, SafetensorError) as error:
                problem = error
            if any_process(self.accelerator, problem is not None):
                if is_main:
                    shutil.rmtree(folder, ignore_errors=True)
                raise files.CheckpointError(
                    f"checkpoint {final} could not be written ({problem or 'another process failed'}); earlier ones "
                    "are intact. Free some space, then resume with --config.resume_from=latest"
                ) from problem
        if name is None and is_main:
            files.prune(self.root, self.options.num_checkpoint_limit)
        logger.info("saved %s", final)
        return final

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote; a ``CheckpointError`` if a file is missing, damaged or of another model."""
        state, saved = self.state, folder / "state"
        try:
            for part, tensors in self._weights().items():
                files.load_into(saved / f"{part}.safetensors", tensors)
            _load_moments(state.optimizer, load_file(saved / "optimizer.safetensors"))
            numbers = json.loads((saved / "trainer.json").read_text(encoding="utf-8"))
            for name in _NUMBERS:
                setattr(state, name, numbers[name])
            state.sampler.load_state_dict(numbers["sampler"])
        except Exception as error:
            raise files.CheckpointError(
                f"cannot resume from {folder}: it is damaged, or of another model or version ({type(error).__name__}: {error})"
            ) from error

    def _weights(self) -> dict[str, Mapping[str, torch.Tensor]]:
        ema = {"ema": self.state.ema.shadow} if self.state.ema else {}
        return {"trainable": self.state.parameters, **self.state.snapshots, **ema}

    def _write_average(self, folder: Path) -> None:
        """Write the averaged weights in the formats of diffusers and PEFT."""
        policy, is_main = self.state.policy, self.accelerator.is_main_process
        with self.state.averaged():
            if not self.options.use_lora:
                save_transformer(policy.transformer, folder / "transformer", is_main)
            elif is_main:
                for save, name in ((save_peft, "adapter"), (save_diffusers, "diffusers")):
                    save(policy, folder / name)
                    write_model_card(folder / name, self.options, policy, self.state.epoch)
