"""The whole state of a run: what training changes, and how it is saved to a checkpoint and loaded from it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.model_card import write_model_card
from paco_grpo.data.sampler import GroupSampler
from paco_grpo.distributed.fsdp2 import save_transformer
from paco_grpo.distributed.processes import Replicated, any_process, main_decides
from paco_grpo.options import RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.base import unwrap
from paco_grpo.policies.lora import save_diffusers, save_peft

logger = logging.getLogger(__name__)


class EMA:
    """Shadow copies of parameters: shadow ← d·shadow + (1 − d)·weight, d = min((1+s)/(10+s), decay).

    s counts optimizer steps; the average moves at every ``update_interval``-th of them (docs/method.md §6).

    Args:
        parameters: Name → trainable parameter.
        decay: Upper bound of d, in [0, 1).
        update_interval: Optimizer steps between two moves.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float, update_interval: int) -> None:
        self.parameters = dict(parameters)
        self.decay, self.update_interval = decay, update_interval
        self.shadow = {name: p.detach().clone().float() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average after optimizer step number ``step`` (the first is 1)."""
        if step % self.update_interval:
            return
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
            parameter.copy_(values[name].to(parameter.device))


@dataclass
class Progress:
    """How far a run is."""

    epoch: int = 0  # finished epochs
    train_seconds: float = 0.0  # in epochs, without evaluations and checkpoints
    elapsed: float = 0.0  # since the start of the run, over all resumes


@dataclass
class TrainState:
    """Everything that training changes."""

    policy: Policy
    parameters: Mapping[str, torch.nn.Parameter]  # trainable, by name
    snapshots: Mapping[str, Mapping[str, torch.nn.Parameter]]  # adapter (``Objective.snapshots``) → its parameters
    ema: EMA | None  # of ``parameters``
    optimizer: torch.optim.Optimizer  # over ``parameters``
    strategy: Replicated  # how all this is spread over the processes
    sampler: GroupSampler
    step: int = 0  # optimizer steps taken
    recompute_old: bool | None = None  # old log-probabilities before training; None = not decided yet
    progress: Progress = field(default_factory=Progress)

    def averaged(self) -> contextlib.AbstractContextManager:
        """The averaged weights, which evaluation and saved adapters use, are in place inside the block."""
        return self.ema.applied() if self.ema else contextlib.nullcontext()


def capture_rng() -> dict[str, Any]:
    """State of the global generators of torch, NumPy and Python (our sampling uses none, a user's reward may)."""
    name, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state().tolist(),
        "cuda": [each.tolist() for each in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), *rest],
        "python": [version, list(words), gauss],
    }


def restore_rng(saved: Mapping[str, Any]) -> None:
    """Restore what ``capture_rng`` returned; GPUs that are not here are left out."""
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    for device, state in zip(range(torch.cuda.device_count()), saved["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.tensor(state, dtype=torch.uint8), device)
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: The run's folder; checkpoints are in its ``checkpoints/``.
        options: The run's, for the model cards.
        state: What is saved and restored.
    """

    def __init__(self, folder: Path, options: RunOptions, state: TrainState) -> None:
        self.root, self.options, self.state = folder / "checkpoints", options, state
        self.accelerator = state.strategy.accelerator

    def save(self, rng: Mapping[str, Any], evaluation: Mapping[str, Any] | None, name: str | None = None) -> Path:
        """Write a checkpoint atomically; a collective operation.

        Args:
            rng: Global generators of this process at the start of the epoch that would come next.
            evaluation: The latest evaluation's row of metrics.jsonl, for the model cards.
            name: Folder name; default by the epoch, and then old checkpoints beyond the limit are removed.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: On every process, when one could not write; the earlier checkpoints are intact.
        """
        writer = files.CheckpointWriter(self.root, name or files.checkpoint_name(self.state.progress.epoch))
        is_main = self.accelerator.is_main_process
        self._together(writer, writer.begin if is_main else None)
        self._together(writer, lambda: self._write(rng, evaluation, writer.folder))
        self._together(writer, writer.commit if is_main else None)
        if name is None and is_main:
            files.prune(self.root, self.options.num_checkpoint_limit)
        logger.info("saved %s", writer.final)
        return writer.final

    def load(self, folder: Path) -> None:
        """Restore everything that ``save`` wrote, including the global generators of this process.

        Raises:
            CheckpointError: On every process: a file is missing or damaged, or belongs to another model or rank.
        """
        state, saved, problem = self.state, folder / "state", None
        try:
            for name, parameters in {"trainable": state.parameters, **state.snapshots}.items():
                files.load_parameters(saved / f"{name}.safetensors", parameters)
            if state.ema:
                files.load_parameters(saved / "ema.safetensors", state.ema.shadow)
            with files.reading(saved / "optimizer.json"):
                optimizer = files.load_optimizer(saved)
            rng = saved / f"rng_{self.accelerator.process_index}.json"
            if rng.is_file():
                with files.reading(rng):
                    restore_rng(files.load_json(rng))
            else:
                logger.warning("the checkpoint was written by fewer processes; this one keeps its own generators")
        except files.CheckpointError as error:
            problem = error
        if any_process(self.accelerator, problem is not None):
            raise problem or files.CheckpointError(f"another process could not read the checkpoint {folder}")
        with files.reading(saved / "optimizer.json"):
            state.strategy.load_optimizer_state(state.optimizer, optimizer)
        with files.reading(saved / "trainer.json"):
            numbers = main_decides(self.accelerator, lambda: files.load_json(saved / "trainer.json"))
            state.progress = Progress(**numbers["progress"])
            state.step, state.recompute_old = numbers["step"], numbers["recompute"]
            state.sampler.load_state_dict(numbers["sampler"])

    def write_cards(self, folder: Path, evaluation: Mapping[str, Any] | None) -> None:
        """Write the model cards of the adapters in checkpoint ``folder`` (main process)."""
        for name in ("adapter", "diffusers"):
            if (folder / name).is_dir():
                write_model_card(
                    folder / name,
                    self.options,
                    self.state.policy,
                    epoch=self.state.progress.epoch,
                    step=self.state.step,
                    evaluation=evaluation,
                )

    def _write(self, rng: Mapping[str, Any], evaluation: Mapping[str, Any] | None, folder: Path) -> None:
        state, saved, is_main = self.state, folder / "state", self.accelerator.is_main_process
        files.save_json(saved / f"rng_{self.accelerator.process_index}.json", rng)
        parts = {"trainable": state.parameters, **state.snapshots} | ({"ema": state.ema.shadow} if state.ema else {})
        actions = [
            functools.partial(files.save_tensors, saved / f"{name}.safetensors", tensors, is_main)
            for name, tensors in parts.items()
        ]
        actions.append(lambda: files.save_optimizer(saved, state.optimizer.state_dict(), is_main))
        actions.append(lambda: self._write_average(folder, evaluation))
        # Each action gathers sharded weights from all processes, so a full disk on one must not end them early.
        problems = [problem for problem in map(_attempt, actions) if problem is not None]
        if problems:
            raise problems[0]
        if is_main:
            numbers = {
                "progress": dataclasses.asdict(state.progress),
                "step": state.step,
                "recompute": state.recompute_old,
                "sampler": state.sampler.state_dict(),
            }
            files.save_json(saved / "trainer.json", numbers)

    def _write_average(self, folder: Path, evaluation: Mapping[str, Any] | None) -> None:
        """Write the averaged weights in the formats of diffusers and PEFT."""
        policy, is_main = self.state.policy, self.accelerator.is_main_process
        with self.state.averaged():
            if not self.options.use_lora:
                save_transformer(unwrap(policy.transformer), folder / "transformer", is_main)
            elif is_main:
                save_peft(policy, folder / "adapter")
                save_diffusers(policy, folder / "diffusers")
                self.write_cards(folder, evaluation)

    def _together(self, writer: files.CheckpointWriter, action: Callable[[], None] | None) -> None:
        """Run ``action`` on this process; all processes fail if one does."""
        problem = _attempt(action) if action is not None else None
        if not any_process(self.accelerator, problem is not None):
            return
        if self.accelerator.is_main_process:
            writer.discard()
        finished = files.list_checkpoints(self.root)
        intact = f"{finished[-1]} is intact" if finished else "there is no earlier checkpoint"
        raise files.CheckpointError(
            f"checkpoint {writer.final} could not be written ({problem or 'another process failed'}); {intact}. "
            "Free some space (config.num_checkpoint_limit keeps fewer), then resume with --config.resume_from=latest"
        ) from problem


def _attempt(action: Callable[[], None]) -> Exception | None:
    """Run it; the write error it raised, if any."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        return error
    return None
