"""What the drivers ``quickstart`` and ``editing`` share: arguments, one run at a time per clone, and a clean end."""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from paco_toy.processes import MARK, QuickstartError, end_marked


def new_parser(script: str, description: str, seed_of: str, minutes: float) -> argparse.ArgumentParser:
    """A driver's command line, to which it may add arguments; ``seed_of`` names what the seed determines, ``minutes`` is a default."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"quickstart/{script}", description=description, formatter_class=style)
    parser.add_argument("--minutes", type=float, default=minutes, help="most time for RL's training epochs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help=f"of {seed_of} (default 0)")
    parser.add_argument("--fresh", action="store_true", help="start over")
    parser.add_argument("overrides", nargs="*", metavar="--config.a.b=value", help="passed to the training script")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments; ``overrides`` holds every --config.… as a tuple. Ends the process with a message at others."""
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if not word.startswith("--config.")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.seed < 0:
        parser.error("--seed must not be negative")
    arguments.overrides = (*arguments.overrides, *rest)
    return arguments


def drive(name: str, out: Path, work: Callable[[], None]) -> int:
    """Runs ``work``; 0 when it succeeds, 1 with one message when not, 130 after Ctrl-C, SIGTERM or SIGHUP."""

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with open(out.parent / ".quickstart.lock", "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise QuickstartError("another quickstart is running in this clone; wait for it or end it") from None
            lock.seek(0)
            # A driver that was killed may have left trainers and servers: they would join, or answer, our own.
            if (mark := lock.read().strip()) and (left := end_marked(mark)):
                print(f"{name}: ended {left} processes of an earlier {name} that was killed", file=sys.stderr)
            os.environ[MARK] = uuid.uuid4().hex
            lock.truncate(0)
            lock.write(os.environ[MARK])
            lock.flush()
            work()
    except QuickstartError as error:
        print(f"\n{name}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        again = "Free some space and run it again; it continues from here."
        print(f"\n{name}: no space left on the disk. {again}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted, everything it started was ended. Run it again to continue.", file=sys.stderr)
        return 130
    return 0
