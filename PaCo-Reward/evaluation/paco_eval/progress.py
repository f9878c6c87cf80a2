"""How far a run is: a bar on a terminal, a line now and then in a log."""

import shutil
import sys
import time
from datetime import timedelta
from typing import Self

from tqdm import tqdm

LINE_EVERY_S = 10.0


class Progress:
    """A context manager. `total` items, of which `done` were there before; everything goes to stderr."""

    def __init__(self, total: int, done: int, unit: str):
        self.total, self.before, self.count, self.unit = total, done, done, unit
        self._watched = sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._started = self._last = time.monotonic()
        # The size is given: tqdm shows no bar on a terminal that does not know its own.
        size = shutil.get_terminal_size()
        self._bar = tqdm(
            total=self.total,
            initial=self.before,
            unit=self.unit,
            ncols=size.columns,
            nrows=size.lines,
            disable=not self._watched,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, scored: bool = True) -> None:
        """One item further; one without a result is not counted."""
        if scored:
            self.count += 1
            self._bar.update()
        now = time.monotonic()
        if not self._watched and (now - self._last >= LINE_EVERY_S or self.count == self.total):
            self._last = now
            self.say(f"{self.count}/{self.total} {self.unit}s  {self._clock(now - self._started)}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()

    def _clock(self, elapsed: float) -> str:
        left = elapsed / max(self.count - self.before, 1) * (self.total - self.count)
        return f"elapsed {timedelta(seconds=round(elapsed))}  left {timedelta(seconds=round(left))}"
