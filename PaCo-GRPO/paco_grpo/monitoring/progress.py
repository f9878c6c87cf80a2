"""How far a long loop is: a bar in a terminal, a line from time to time in a log."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

_DELAY_S = 2.0  # a loop that is shorter has no bar
_LINE_EVERY_S = 60.0


@contextlib.contextmanager
def progress(
    what: str, total: int, is_main: bool = True, processes: int = 1, unit: str = "images"
) -> Iterator[Callable[[int], object]]:
    """Show the progress of the block, which calls what it gets with the number of finished units.

    Args:
        what: What is done.
        total: Units of this process.
        is_main: Whether this process shows anything.
        processes: That do the same.
        unit: What is counted.
    """
    if processes > 1:
        unit = f"{unit} on each of {processes} processes"
    if not is_main:
        yield lambda count: None
    elif sys.stderr.isatty():
        bar = tqdm(
            total=total, desc=what, unit=f" {unit}", leave=False, delay=_DELAY_S, mininterval=1.0
        )
        with logging_redirect_tqdm(), bar:
            yield bar.update
    else:
        yield _Lines(what, total, unit).add


class _Lines:
    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0
        self.started = time.monotonic()
        self.logged = self.started

    def add(self, count: int) -> None:
        """Count finished units, and log a line if the last one is long ago."""
        self.done += count
        now = time.monotonic()
        if now - self.logged < _LINE_EVERY_S or self.done >= self.total:
            return
        self.logged = now
        left = ""
        if self.done:
            minutes = (now - self.started) / self.done * (self.total - self.done) / 60
            left = f", {minutes:.1f} min left"
        logger.info("%s: %d of %d %s%s", self.what, self.done, self.total, self.unit, left)
