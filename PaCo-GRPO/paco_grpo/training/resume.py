"""How a run begins again, and how it ends early."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch

from paco_grpo.data.sets import fingerprint_sets
from paco_grpo.distributed import ProcessError, Stopped
from paco_grpo.evaluation.evaluate import EvaluationError
from paco_grpo.options import OPTIONS, ConfigError, RunOptions, load_options, public_options
from paco_grpo.options.schema import TrainOptions
from paco_grpo.policies.adapters import find_lora
from paco_grpo.rewards.contract import Reward
from paco_grpo.rewards.queue import ScoringError
from paco_grpo.training import checkpoints
from paco_grpo.training.checks import out_of_memory
from paco_grpo.training.update import NonFiniteError
from paco_judge.errors import UserError
from paco_judge.files import write_atomically
from paco_judge.identity import UNRECORDED, Match, identity, match

if TYPE_CHECKING:
    from paco_grpo.training.build import Run

logger = logging.getLogger(__name__)

# With other values of these, the weights of a checkpoint mean something else.
_BOUND = (
    "seed",
    "pretrained.model",
    "use_lora",
    "train.loss_type",
    "train.loss_kwargs",
    "train.lora_rank",
    "train.lora_alpha",
    "train.lora_targets",
    "train.lora_path",
    "train.reference",
    "train.use_8bit_adam",
)
# Options that may differ without a message; the text length may be derived.
_UNIMPORTANT = (
    "resume_from",
    "resume_changed",
    "run_name",
    "max_sequence_length",
    "train.max_sequence_length",
)


@dataclass(frozen=True)
class Earlier:
    """What a run continues."""

    checkpoint: Path | None = None  # None: the run starts from its beginning
    # Option or reward → identity (``paco_judge.identity``) in the run of the checkpoint.
    identities: Mapping[str, str | None] = field(default_factory=dict)


def find_earlier(options: RunOptions, folder: Path) -> Earlier:
    """Refuse a folder that holds a run, unless it resumes with what its checkpoints belong to.

    Every option that differs from the saved configuration is logged. Other values of ``_BOUND``,
    another prompt set and another model in the same folders are refused unless
    ``config.resume_changed`` is set.

    Raises:
        ConfigError: The folder holds a run that these options may not continue.
        CheckpointError: The checkpoint is of another version.
    """
    checkpoint = None
    own = checkpoints.list_checkpoints(folder / "checkpoints")
    holds_a_run = bool(own) or (folder / "metrics.jsonl").exists() or (folder / "eval").exists()
    is_another = holds_a_run
    if options.resume_from:
        checkpoint = checkpoints.find_checkpoint(options.resume_from, folder)
        is_another = holds_a_run and checkpoint is not None and not _is_in(checkpoint, folder)
    if is_another:
        raise ConfigError(
            f"{folder} already holds a run: give --config.resume_from=latest or another run_name"
        )
    if not options.resume_from:
        return Earlier()
    if checkpoint is None:
        logger.warning("%s has no checkpoint, starting from the beginning", folder)
        return Earlier()
    checkpoints.read_numbers(checkpoint)
    plan = json.loads((checkpoint.parents[1] / "plan.json").read_bytes())
    # An earlier version wrote others, under another name.
    earlier = Earlier(checkpoint, plan.get("identities", {}))
    _compare(options, earlier)
    return earlier


def _is_in(checkpoint: Path, folder: Path) -> bool:
    own = folder / "checkpoints"
    return own.is_dir() and checkpoint.parent.samefile(own)


def identities(options: RunOptions) -> dict[str, str | None]:
    """The identities of what ``options`` name, by option."""
    of_options = {
        "dataset": fingerprint_sets(options),
        "pretrained.model": identity(options.pretrained.model),
    }
    if options.train.lora_path:
        of_options["train.lora_path"] = identity(find_lora(options.train.lora_path))
    return of_options


def reward_identities(rewards: Mapping[str, Reward]) -> dict[str, str | None]:
    """The identities of what scores, by the rewards' names."""
    return {f"the weights of {name}": reward.weights() for name, reward in rewards.items()}


def compare_rewards(options: RunOptions, earlier: Earlier, rewards: Mapping[str, Reward]) -> None:
    """Refuse other weights of a judge or reward than those of the run that is continued.

    Raises ConfigError.
    """
    if earlier.checkpoint is None:
        return
    now = reward_identities(rewards)
    known = {name: now[name] for name in now if name in earlier.identities}
    _refuse_others(options, earlier, _others(earlier, known))


def load_state(run: Run) -> None:
    """Load the checkpoint that ``run`` resumes from, and set aside what came after it."""
    if not run.options.resume_from:
        return
    checkpoint = run.earlier.checkpoint
    if checkpoint is not None:
        run.checkpoints.load(checkpoint)
        logger.info("resumed from %s", checkpoint)
    if run.accelerator.is_main_process:
        if checkpoint is None:
            checkpoints.archive_superseded(run.folder / "eval", -1)
            run.metrics.set_aside()
        else:
            epoch = run.state.epoch
            checkpoints.archive_superseded(run.checkpoints.root, epoch)
            checkpoints.archive_superseded(run.folder / "eval", epoch)
            run.metrics.keep_until(epoch)
    run.accelerator.wait_for_everyone()


def forget_prompts(folder: Path) -> None:
    """Let the run in ``folder`` resume with a prompt set whose files have changed."""
    plan = json.loads((folder / "plan.json").read_bytes())
    plan["identities"]["dataset"] = None
    write_atomically(folder / "plan.json", json.dumps(plan, indent=1))


def _compare(options: RunOptions, earlier: Earlier) -> None:
    """Log the options that differ from the earlier run, and refuse some."""
    before = public_options(load_options(str(earlier.checkpoint.parents[1] / "config.yaml")))
    options = public_options(options)
    bound = []
    for name in OPTIONS:
        saved = attrgetter(name)(before)
        now = attrgetter(name)(options)
        if saved != now and name not in _UNIMPORTANT:
            logger.warning("resuming with another config.%s: %r -> %r", name, saved, now)
            if name in _BOUND:
                bound.append(f"config.{name} ({saved!r} -> {now!r})")
    for name in _others(earlier, identities(options)):
        place = attrgetter(name)(options) or "config.datasets"
        bound.append(f"config.{name} ({place} holds other files)")
    _refuse_others(options, earlier, bound)


def _others(earlier: Earlier, now: Mapping[str, str | None]) -> list[str]:
    """The names of what is known to be another; a line says of what this is unknown."""
    others = []
    unknown = []
    for name, of_today in now.items():
        of_name = match(earlier.identities.get(name, UNRECORDED), of_today)
        if of_name is Match.DIFFERENT:
            others.append(name)
        elif of_name is not Match.SAME:
            unknown.append(f"{name} ({of_name.value})")
    if unknown:
        logger.warning(
            "resuming without knowing whether these are as before: %s", ", ".join(unknown)
        )
    return others


def _refuse_others(options: RunOptions, earlier: Earlier, others: Sequence[str]) -> None:
    if others and not options.resume_changed:
        raise ConfigError(
            f"{earlier.checkpoint.parents[1]} was trained with other values of {', '.join(others)}: "
            "use those again, or set --config.resume_changed=True"
        )


# --- ending early ---------------------------------------------------------------------------------


class StopSignal:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal): save and exit at the next safe point."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are installed inside the block."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            self._time = time.monotonic()
            name = signal.Signals(number).name
            logger.warning("%s received: saving and exiting at the next safe point", name)
        # Launchers forward one Ctrl-C as several signals: only a later one means "now".
        elif number == signal.SIGINT and time.monotonic() - self._time > 2:
            raise KeyboardInterrupt


class TrainingStopped(RuntimeError):
    """The run ended early with its state saved; the message says why and how to resume."""

    def __init__(self, message: str, signal_number: int | None = None) -> None:
        super().__init__(message)
        self.signal_number = signal_number  # that asked for it


class StopTraining(Exception):
    """Raised on every process to save the state and end the run; the message says why."""


def require_scores(
    share: float, shares: Mapping[str, float], images: str, train: TrainOptions
) -> None:
    """Stop the run if more than the allowed share of ``images`` lacks a score.

    ``share`` counts images without all of their scores, ``shares`` those without each one.
    """
    limit = train.max_missing_reward_fraction
    if share <= limit:
        return
    by_reward = ", ".join(f"{name} {value:.0%}" for name, value in shares.items())
    raise StopTraining(
        f"{share:.0%} of {images} have no score ({by_reward}), more than "
        f"config.train.max_missing_reward_fraction={limit:g} allows. The log above says "
        "why: a judge or service that is gone must be started again, one that answers neither Yes "
        "nor No is the wrong model (docs/judge.md, troubleshooting)"
    )


@contextlib.contextmanager
def resumable(run: Run, signals: StopSignal) -> Iterator[None]:
    """What ends the run early inside the block becomes a ``TrainingStopped``."""
    state = run.state
    try:
        yield
    except Stopped:
        run.checkpoints.save_epoch()
        _stop(run, "by a signal", signals.received)
    except StopTraining as reason:
        run.checkpoints.save_epoch()
        _stop(run, str(reason))
    except EvaluationError as error:
        _stop(
            run,
            f"after epoch {state.epoch}, {error}. Its weights are not saved now; an earlier "
            "checkpoint may be better",
        )
    except NonFiniteError as error:
        if error.weights_changed:
            _stop(run, str(error))
        name = f"stopped_{checkpoints.checkpoint_name(state.epoch + 1)}"
        folder = run.checkpoints.save(name)
        _stop(run, f"{error} State at that point: {folder}")
    except Exception as error:
        _save_after(error, run)
        raise


def _save_after(error: Exception, run: Run) -> None:
    """After an error, save the state if it is intact; stop, unless the error is a bug.

    Nothing is done after an error that only this process knows of: the others do not save.
    """
    text = str(error)
    is_shared = run.accelerator.num_processes == 1 or isinstance(error, ProcessError | ScoringError)
    if not is_shared or isinstance(error, checkpoints.CheckpointError):
        return
    cause = error.__cause__ if isinstance(error, ProcessError) else error  # None on the others
    if isinstance(error, torch.OutOfMemoryError):
        text = out_of_memory(run.options, error)
    if isinstance(cause, torch.OutOfMemoryError):
        traceback.clear_frames(cause.__traceback__)  # saving needs the memory of their tensors
        torch.cuda.empty_cache()
    saved = "the last checkpoint is kept"
    if run.state.between_epochs:
        run.checkpoints.save_epoch()
        saved = f"the state after epoch {run.state.epoch} is saved"
    is_defect = not isinstance(cause, UserError | ScoringError | torch.OutOfMemoryError | None)
    if not is_defect:
        _stop(run, f"{text}; {saved}")
    logger.error("an error ends the run; %s", saved)


def _stop(run: Run, why: str, signal_number: int | None = None) -> NoReturn:
    run.accelerator.end_training()
    name = run.options.run_name
    resume = f"the same command with --config.run_name={name} --config.resume_from=latest"
    raise TrainingStopped(f"{why}. To resume: {resume}", signal_number)
