"""How a run ends early: by a signal, by a reason to stop, or by an error after which it resumes."""

import contextlib
import logging
import signal
import time
import traceback
from collections.abc import Generator, Mapping
from types import FrameType
from typing import NoReturn

import torch

from paco_grpo.distributed import ProcessError, Stopped
from paco_grpo.evaluation.evaluate import EvaluationError
from paco_grpo.options.schema import TrainOptions
from paco_grpo.rewards.queue import ScoringError
from paco_grpo.training.checkpoints import CheckpointError, Checkpoints, checkpoint_name
from paco_grpo.training.checks import out_of_memory
from paco_grpo.training.update import NonFiniteError
from paco_judge.errors import UserError

logger = logging.getLogger(__name__)


class StopSignal:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal): save and exit at the next safe point."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
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
def resumable(checkpoints: Checkpoints, signals: StopSignal) -> Generator[None]:
    """What ends the run early inside the block becomes a ``TrainingStopped``.

    ``checkpoints``: of the run.
    """
    state = checkpoints.state
    try:
        yield
    except Stopped:
        checkpoints.save_epoch()
        _stop(checkpoints, "by a signal", signals.received)
    except StopTraining as reason:
        checkpoints.save_epoch()
        _stop(checkpoints, str(reason))
    except EvaluationError as error:
        _stop(
            checkpoints,
            f"after epoch {state.epoch}, {error}. Its weights are not saved now; an earlier "
            "checkpoint may be better",
        )
    except NonFiniteError as error:
        if error.weights_changed:
            _stop(checkpoints, str(error))
        name = f"stopped_{checkpoint_name(state.epoch + 1)}"
        folder = checkpoints.save(name)
        _stop(checkpoints, f"{error} State at that point: {folder}")
    except Exception as error:
        _save_after(error, checkpoints)
        raise


def _save_after(error: Exception, checkpoints: Checkpoints) -> None:
    """After an error, save the state if it is intact; stop, unless the error is a bug.

    Nothing is done after an error that only this process knows of: the others do not save.
    """
    text = str(error)
    is_alone = checkpoints.accelerator.num_processes == 1
    is_shared = is_alone or isinstance(error, ProcessError | ScoringError)
    if not is_shared or isinstance(error, CheckpointError):
        return
    cause = error.__cause__ if isinstance(error, ProcessError) else error  # None on the others
    if isinstance(error, torch.OutOfMemoryError):
        text = out_of_memory(checkpoints.options, error)
    if isinstance(cause, torch.OutOfMemoryError):
        traceback.clear_frames(cause.__traceback__)  # saving needs the memory of their tensors
        torch.cuda.empty_cache()
    saved = "the last checkpoint is kept"
    if checkpoints.state.between_epochs:
        checkpoints.save_epoch()
        saved = f"the state after epoch {checkpoints.state.epoch} is saved"
    is_defect = not isinstance(cause, UserError | ScoringError | torch.OutOfMemoryError | None)
    if not is_defect:
        _stop(checkpoints, f"{text}; {saved}")
    logger.error("an error ends the run; %s", saved)


def _stop(checkpoints: Checkpoints, why: str, signal_number: int | None = None) -> NoReturn:
    checkpoints.accelerator.end_training()
    name = checkpoints.options.run_name
    resume = f"the same command with --config.run_name={name} --config.resume_from=latest"
    raise TrainingStopped(f"{why}. To resume: {resume}", signal_number)
