"""The error of this package that users can repair, and how commands show errors."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from safetensors import SafetensorError


class PacoRewardError(ValueError):
    """The message names the thing and the remedy; the command line shows it without a traceback."""


# Other errors come from inside LLaMA-Factory, where the traceback helps.
TRAINING_ERRORS = (PacoRewardError, OSError, SafetensorError)


def report_errors(command: Callable[[], int], errors: tuple[type[Exception], ...]) -> int:
    """The exit status of ``command``; 1 and one line on standard error after one of ``errors``."""
    try:
        return command()
    except errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit(143), so that temporary folders and child processes go too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
