"""What the drivers `quickstart` and `editing` share: arguments, one at a time in a clone, and an orderly end."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import signal
from collections.abc import Iterator
from pathlib import Path

from paco_toy.processes import QuickstartError


def new_parser(script: str, description: str, seed_of: str) -> argparse.ArgumentParser:
    """A driver's command line, to which it may add its own arguments; `seed_of` says what the seed decides."""
    parser = argparse.ArgumentParser(
        prog=f"quickstart/{script}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="time for RL's training epochs (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help=f"of {seed_of} (default 0)")
    parser.add_argument("--fresh", action="store_true", help="start over")
    parser.add_argument("overrides", nargs="*", metavar="--config.a.b=value", help="further arguments of the training script")
    return parser


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The arguments; `overrides` holds every --config.… as a tuple. Ends the process with a message at others."""
    arguments, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if not word.startswith("--config.")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.seed < 0:
        parser.error("--seed is a number from 0 on")
    arguments.overrides = (*arguments.overrides, *rest)
    return arguments


def end_as_by_ctrl_c() -> None:
    """From here on SIGTERM and SIGHUP end the driver as Ctrl-C does, so that it ends what it started."""

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


@contextlib.contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Refuse a second driver in the same clone."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out.parent / ".quickstart.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuickstartError("another quickstart is running in this clone; wait for it or end it") from None
        yield
