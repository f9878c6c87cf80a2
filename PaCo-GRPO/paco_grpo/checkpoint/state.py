"""The whole state of a run, saved to a checkpoint and loaded from it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.ema import EMA
from paco_grpo.checkpoint.model_card import write_model_card
from paco_grpo.data.sampler import GroupSampler
from paco_grpo.distributed.collectives import any_process, save_transformer
from paco_grpo.distributed.replicated import Replicated
from paco_grpo.options import RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.base import unwrap
from paco_grpo.policies.lora import save_diffusers, save_peft

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is."""

    epoch: int = 0  # finished epochs
    train_seconds: float = 0.0  # in epochs, without evaluations and checkpoints
    elapsed: float = 0.0  # since the start of the run, over all resumes


@dataclass
class TrainState:
    """Everything that training changes.

    Attributes:
        policy: The generator.
        parameters: Trainable, by name.
        snapshots: Adapter name → its parameters by name (``Objective.snapshots``).
        ema: Average of ``parameters``, None = off.
        optimizer: Over ``parameters``, as the strategy prepared it.
        strategy: How they are spread over the processes.
        sampler: Sampler of prompts.
        step: Optimizer steps taken.
        recompute_old: Whether old log-probabilities are recomputed before training; None = not decided yet.
        progress: How far the run is.
    """

    policy: Policy
    parameters: Mapping[str, torch.nn.Parameter]
    snapshots: Mapping[str, Mapping[str, torch.nn.Parameter]]
    ema: EMA | None
    optimizer: Any
    strategy: Replicated
    sampler: GroupSampler
    step: int = 0
    recompute_old: bool | None = None
    progress: Progress = field(default_factory=Progress)

    def averaged(self) -> contextlib.AbstractContextManager:
        """The averaged weights, which evaluation and saved adapters use, are in place inside the block."""
        return self.ema.applied() if self.ema else contextlib.nullcontext()


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

    def save(self, rng: files.RngState, evaluation: Mapping[str, Any] | None, name: str | None = None) -> Path:
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
            CheckpointError: A file is missing or damaged, or belongs to another model or rank.
        """
        state, saved = self.state, folder / "state"
        numbers = files.load_json(saved / "trainer.json")
        files.load_parameters(saved / "trainable.safetensors", state.parameters)
        for name, parameters in state.snapshots.items():
            files.load_parameters(saved / f"{name}.safetensors", parameters)
        if state.ema:
            state.ema.load_state_dict(files.load_tensors(saved / "ema.safetensors"))
        state.strategy.load_optimizer_state(state.optimizer, files.load_optimizer(saved))
        state.sampler.load_state_dict(numbers["sampler"])
        state.step, state.recompute_old = numbers["step"], numbers["recompute"]
        state.progress = Progress(**numbers["progress"])
        files.load_rng(saved, self.accelerator.process_index)

    def write_cards(self, folder: Path, evaluation: Mapping[str, Any] | None) -> None:
        """Write the model cards of the adapters in checkpoint ``folder`` (main process)."""
        for name in ("adapter", "diffusers"):
            if (folder / name).is_dir():
                write_model_card(
                    folder / name,
                    self.options,
                    epoch=self.state.progress.epoch,
                    step=self.state.step,
                    edits_images=self.state.policy.edits_images,
                    evaluation=evaluation,
                )

    def _write(self, rng: files.RngState, evaluation: Mapping[str, Any] | None, folder: Path) -> None:
        state, saved, is_main = self.state, folder / "state", self.accelerator.is_main_process
        files.save_rng(saved, self.accelerator.process_index, rng)
        parts = {"trainable": state.parameters, **state.snapshots}
        if state.ema:
            parts["ema"] = state.ema.state_dict()
        actions = [
            functools.partial(files.save_tensors, saved / f"{name}.safetensors", tensors, is_main)
            for name, tensors in parts.items()
        ]
        actions.append(lambda: files.save_optimizer(saved, state.strategy.optimizer_state(state.optimizer), is_main))
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
    except OSError as error:
        return error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # raised by safetensors on a full disk; not exported stably
            raise
        return error
    return None
