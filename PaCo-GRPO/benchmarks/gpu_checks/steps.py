"""Steps that run one after the other: bounded in time, and a failure does not end the rest."""

import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

MIN_SECONDS = 10  # a step is not begun with less time than this


class Skipped(Exception):
    """The step does not apply to this machine; the message says why."""


class Deviates(Exception):
    """The step ran, and its numbers are not those that they should be."""


@dataclass(frozen=True)
class Step:
    """One check."""

    name: str
    seconds: float  # at most
    run: Callable[[], dict[str, Any]]  # its figures


@dataclass
class Result:
    """What became of a step."""

    name: str
    status: str  # passed, failed or skipped
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    def line(self) -> str:
        """One row of the table on the screen."""
        figures = ", ".join(f"{name} {_short(value)}" for name, value in self.figures.items())
        text = ": ".join(filter(None, (figures, self.message)))
        return f"{self.status:<8} {self.seconds:6.1f} s  {self.name:<28} {text}"

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return asdict(self)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def run_steps(steps: Sequence[Step], deadline: float) -> Iterator[Result]:
    """Run ``steps`` until ``deadline`` (of ``time.monotonic``)."""
    for step in steps:
        limit = min(step.seconds, deadline - time.monotonic())
        if limit < MIN_SECONDS:
            yield Result(step.name, "skipped", message="no time left")
            continue
        started = time.monotonic()
        result = _run(step, limit)
        result.seconds = time.monotonic() - started
        yield result
        gc.collect()
        if torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):  # a broken GPU is reported by the next step
                torch.cuda.empty_cache()


def _run(step: Step, limit: float) -> Result:
    try:
        with _time_limit(limit):
            return Result(step.name, "passed", figures=step.run())
    except Skipped as reason:
        return Result(step.name, "skipped", message=str(reason))
    except TimeoutError as error:
        return Result(step.name, "failed", message=str(error))
    except Exception as error:  # noqa: BLE001 - the next step may still tell something
        text = " ".join(str(error).split())[:300]
        return Result(step.name, "failed", message=f"{type(error).__name__}: {text}")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TimeoutError(f"not finished in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
