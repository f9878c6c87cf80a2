"""What the quickstart shows: numbered stages, one live line, time left."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

QUIET_SECONDS = 20.0  # between progress lines where there is no terminal to rewrite
REFRESH_SECONDS = 0.2
PRIOR = 60.0  # seconds at the expected pace that count as seen beforehand: a first stage of seconds says little


def clock(seconds: float) -> str:
    """`3:07`, or `1:02:07` from an hour on."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass
class TimeLeft:
    """Seconds left over all stages, from what each is expected to take and from how fast this machine has been.

    Attributes:
        expected: Stage name -> seconds on two cores, in order.
        spent: Stage name -> seconds of the finished stages.
    """

    expected: Mapping[str, float]
    spent: dict[str, float] = field(default_factory=dict)

    def pace(self) -> float:
        """This machine's seconds for each expected second; near 1 until enough has been seen to say otherwise."""
        known = [n for n in self.spent if n in self.expected]
        return (PRIOR + sum(self.spent[n] for n in known)) / (PRIOR + sum(self.expected[n] for n in known))

    def left(self, current: str, elapsed: float, fraction: float | None) -> float:
        """Seconds left, `fraction` in [0, 1] of the current stage being done (None: unknown)."""
        pace = self.pace()
        guess = max(self.expected.get(current, 0.0) * pace - elapsed, 0.0)
        if fraction:
            # The stage's own rate says more the further it is.
            by_rate = elapsed * (1 - fraction) / fraction
            guess = fraction * by_rate + (1 - fraction) * guess
        later = [n for n in self.expected if n not in self.spent and n != current]
        return guess + pace * sum(self.expected[n] for n in later)


class Console:
    """Writes to a terminal (one live line, rewritten) or to a file (a progress line now and then)."""

    def __init__(self, time_left: TimeLeft, total: int, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.time_left, self.total = time_left, total
        self.live = self.stream.isatty()
        self.stage_name, self.stage_started = "", time.monotonic()
        self._shown, self._live_line = 0.0, False

    def stage(self, number: int, name: str, title: str) -> None:
        """Begin a stage."""
        self.stage_name, self.stage_started, self._shown = name, time.monotonic(), time.monotonic()
        self.line(f"\n[{number}/{self.total}] {title}", indent=0)

    def line(self, text: str, indent: int = 6) -> None:
        """One line that stays."""
        self._clear()
        self.stream.write("\n".join(" " * indent + part if part else "" for part in text.split("\n")) + "\n")
        self.stream.flush()

    def progress(self, what: str, fraction: float | None, text: str = "") -> None:
        """The live line: what is being done, how far, time left over all stages."""
        now = time.monotonic()
        if now - self._shown < (REFRESH_SECONDS if self.live else QUIET_SECONDS):
            return
        self._shown = now
        elapsed = now - self.stage_started
        left = self.time_left.left(self.stage_name, elapsed, fraction)
        bar = "" if fraction is None else f" {self._bar(fraction)} {fraction:4.0%}"
        shown = f"      {what}{bar}  {clock(elapsed)}, about {clock(left)} left in all" + (f"  {text}" if text else "")
        if not self.live:
            self.stream.write(shown + "\n")
        else:
            width = shutil.get_terminal_size((100, 24)).columns - 1
            self.stream.write("\r\x1b[2K" + shown[:width])
            self._live_line = True
        self.stream.flush()

    @staticmethod
    def _bar(fraction: float, width: int = 20) -> str:
        full = round(width * min(max(fraction, 0.0), 1.0))
        return "█" * full + "░" * (width - full)

    def _clear(self) -> None:
        if self._live_line:
            self.stream.write("\r\x1b[2K")
            self._live_line = False
