"""The error that a user can repair, and how every command of this repository shows it."""

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LAUNCHER_S = 15.0  # until the main process has ended, and it has noticed


class UserError(ValueError):
    """Something that the user can repair.

    The message says what is wrong, where, and what to do; commands show it without a traceback.
    """


def first_problem(error: Any) -> str:
    """What is wrong first in a ``ValidationError`` of pydantic: the field, why, and its value."""
    problem = error.errors()[0]
    field = ".".join(map(str, problem["loc"]))
    return f"{field}: {problem['msg']}, got {problem['input']!r}"


def run_command(command: Callable[[], int | None], *others: type[Exception]) -> int:
    """The exit status of a command: 0 or what it returns, 1 after an error, 130 after Ctrl-C.

    Args:
        command: The command without its arguments.
        others: Further errors that are shown without a traceback, besides UserError.
    """
    try:
        return command() or 0
    except (UserError, *others) as error:
        print_error(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def print_error(text: str) -> None:
    """Print ``text`` to standard error, once if all processes of a launcher end for this reason.

    The others wait: when the main process has ended, the launcher ends them.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_LAUNCHER_S)
    print(text, file=sys.stderr)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let this process get a signal when its parent ends, even when that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_process(status: int) -> NoReturn:
    """End this process; if a launcher started it (torchrun, accelerate), without Python's teardown.

    During the teardown a thread of Gloo that frees a collective's last tensor asks for the
    interpreter and aborts the process, once in some ten runs of two processes on a CPU (torch
    2.13). The launcher would call a finished training failed.
    """
    if "LOCAL_RANK" in os.environ:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
