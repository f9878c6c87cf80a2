"""How a run ends early: its state is saved where that is good, and the message says how to resume."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NoReturn

from paco_grpo.checkpoint import files
from paco_grpo.distributed.launch import StopSignal
from paco_grpo.distributed.processes import Stopped
from paco_grpo.evaluation.evaluate import EvaluationError
from paco_grpo.options.schema import TrainOptions
from paco_grpo.rewards.queue import ScoringError
from paco_grpo.training.build import Run
from paco_grpo.training.update import NonFiniteError


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
        f"config.train.max_missing_reward_fraction={limit:g} allows. If a judge or reward "
        "service is gone, restart it first"
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
    except ScoringError as error:
        run.checkpoints.save_epoch()
        _stop(run, f"a reward failed after {state.epoch} finished epochs ({error})")
    except EvaluationError as error:
        _stop(
            run,
            f"after epoch {state.epoch}, {error}. Its weights are not saved now; an earlier "
            "checkpoint may be better",
        )
    except NonFiniteError as error:
        if error.weights_changed:
            _stop(run, str(error))
        name = f"stopped_{files.checkpoint_name(state.epoch + 1)}"
        folder = run.checkpoints.save(name)
        _stop(run, f"{error} State at that point: {folder}")


def _stop(run: Run, why: str, signal_number: int | None = None) -> NoReturn:
    run.accelerator.end_training()
    name = run.options.run_name
    resume = f"the same command with --config.run_name={name} --config.resume_from=latest"
    raise TrainingStopped(f"{why}. To resume: {resume}", signal_number)
