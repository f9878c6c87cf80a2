"""The whole state of a run, out to a checkpoint and back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paco_grpo.policies.adapters import save_diffusers, save_peft, unwrap
from paco_grpo.training import checkpoint as ckpt
from paco_grpo.training.model_card import write_model_card
from paco_grpo.training.processes import any_process
from paco_grpo.training.setup import Run
from paco_grpo.training.sharded import save_transformer

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is."""

    epoch: int = 0  # finished epochs
    train_seconds: float = 0.0  # in epochs, without evaluations and checkpoints
    elapsed: float = 0.0  # since the start of the run, over all resumes


def save(run: Run, progress: Progress, rng: ckpt.RngState, name: str | None = None) -> Path:
    """Write a checkpoint, atomically; every process takes part.

    Args:
        run: Its weights, average, optimizer and sampler are saved.
        progress: Where it is.
        rng: Global generators of this process at the start of the epoch that would come next.
        name: Folder name; default by the epoch, and then old checkpoints beyond the limit are removed.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: On every process, when one could not write; the earlier checkpoints are intact.
    """
    root = run.folder / "checkpoints"
    writer = ckpt.CheckpointWriter(root, name or ckpt.checkpoint_name(progress.epoch))
    is_main = run.accelerator.is_main_process
    _together(run, writer, writer.begin if is_main else None)
    _together(run, writer, lambda: _write(run, progress, rng, writer.folder))
    _together(run, writer, writer.commit if is_main else None)
    if name is None:
        run.journal.forget_before(progress.epoch)
        if is_main:
            ckpt.prune(root, run.config.num_checkpoint_limit)
    logger.info("saved %s", writer.final)
    return writer.final


def load(run: Run, folder: Path) -> Progress:
    """Restore everything that ``save`` wrote, also the global generators of this process.

    Raises:
        CheckpointError: A file is missing or damaged, or belongs to another model or rank.
    """
    state = folder / "state"
    numbers = ckpt.load_json(state / "trainer.json")
    ckpt.load_parameters(state / "trainable.safetensors", run.parameters)
    for name, parameters in run.extra_parameters.items():
        ckpt.load_parameters(state / f"{name}.safetensors", parameters)
    if run.ema:
        run.ema.load_state_dict(ckpt.load_tensors(state / "ema.safetensors"))
    run.engine.load_optimizer(state, run.updater.optimizer)
    run.sampler.load_state_dict(numbers["sampler"])
    run.updater.step, run.updater.recompute = numbers["step"], numbers["recompute"]
    ckpt.load_rng(state, run.accelerator.process_index)
    return Progress(**numbers["progress"])


def _write(run: Run, progress: Progress, rng: ckpt.RngState, folder: Path) -> None:
    state = folder / "state"
    ckpt.save_rng(state, run.accelerator.process_index, rng)
    is_main = run.accelerator.is_main_process
    parts = {"trainable": run.parameters, **run.extra_parameters, **({"ema": run.ema.state_dict()} if run.ema else {})}
    actions = [
        functools.partial(ckpt.save_tensors, state / f"{name}.safetensors", tensors, is_main)
        for name, tensors in parts.items()
    ]
    actions.append(lambda: run.engine.save_optimizer(state, run.updater.optimizer))
    actions.append(lambda: _write_average(run, progress, folder))
    # Weights that are divided over processes are gathered in each action, so a full disk must not end them early.
    problems = [problem for problem in map(_attempt, actions) if problem is not None]
    if problems:
        raise problems[0]
    if not is_main:
        return
    ckpt.save_json(
        state / "trainer.json",
        {
            "progress": dataclasses.asdict(progress),
            "step": run.updater.step,
            "recompute": run.updater.recompute,
            "sampler": run.sampler.state_dict(),
        },
    )


def _write_average(run: Run, progress: Progress, folder: Path) -> None:
    """What evaluation uses, the averaged weights, in the formats of others."""
    is_main = run.accelerator.is_main_process
    with run.ema.applied() if run.ema else contextlib.nullcontext():
        if not run.config.use_lora:
            save_transformer(unwrap(run.policy.transformer), folder / "transformer", is_main)
        elif is_main:
            save_peft(run.policy, folder / "adapter")
            save_diffusers(run.policy, folder / "diffusers")
            write_cards(run, progress.epoch, folder)


def write_cards(run: Run, epoch: int, folder: Path) -> None:
    """The model cards of the adapters in checkpoint ``folder``, with the latest evaluation (main process)."""
    evaluations = [row for row in run.metrics.rows() if row["phase"] == "eval"]
    for name in ("adapter", "diffusers"):
        if (folder / name).is_dir():
            write_model_card(
                folder / name,
                run.config,
                epoch=epoch,
                step=run.updater.step,
                edits_images=run.policy.edits_images,
                evaluation=evaluations[-1] if evaluations else None,
            )


def _together(run: Run, writer: ckpt.CheckpointWriter, action: Callable[[], None] | None) -> None:
    """Do ``action`` on this process; all processes fail if one does."""
    problem = _attempt(action) if action is not None else None
    if not any_process(run.accelerator, problem is not None):
        return
    if run.accelerator.is_main_process:
        writer.discard()
    there = ckpt.list_checkpoints(writer.final.parent)
    intact = f"{there[-1]} is intact" if there else "there is none yet"
    raise ckpt.CheckpointError(
        f"checkpoint {writer.final} could not be written ({problem or 'another process failed'}); {intact}. "
        "Free some space (config.num_checkpoint_limit keeps fewer), then resume with --config.resume_from=latest"
    ) from problem


def _attempt(action: Callable[[], None]) -> Exception | None:
    """Do it; what kept it from writing, if anything."""
    try:
        action()
    except OSError as error:
        return error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # how safetensors reports a full disk
            raise
        return error
    return None
