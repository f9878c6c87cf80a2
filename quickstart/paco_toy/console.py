"""The quickstart's output on the terminal: numbered stages, a live line with the time left, tables."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

QUIET_SECONDS = 20.0  # between progress lines where the output is not a terminal
REFRESH_SECONDS = 0.2
# Seconds at the expected pace that count as already observed, so that a first short stage has little weight.
PRIOR = 60.0


def clock(seconds: float) -> str:
    """`3:07`, or `1:02:07` from an hour on."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table of a wide first column and narrow others."""
    width = max(len(row[0]) for row in rows)
    return "\n".join("  ".join([f"{row[0]:<{width}}", *(f"{cell:<13}" for cell in row[1:])]).rstrip() for row in rows)


@dataclass
class TimeLeft:
    """Seconds left over all stages, from their expected times and the pace of this machine so far.

    Attributes:
        expected: Stage name -> seconds on two cores, in order.
        spent: Stage name -> seconds of the finished stages.
    """

    expected: Mapping[str, float]
    spent: dict[str, float] = field(default_factory=dict)

    def pace(self) -> float:
        """This machine's seconds per expected second; near 1 until enough has been observed."""
        known = [n for n in self.spent if n in self.expected]
        return (PRIOR + sum(self.spent[n] for n in known)) / (PRIOR + sum(self.expected[n] for n in known))

    def left(self, current: str, elapsed: float, fraction: float | None) -> float:
        """Seconds left when ``fraction`` in [0, 1] of the current stage is done (None: unknown)."""
        pace = self.pace()
        guess = max(self.expected.get(current, 0.0) * pace - elapsed, 0.0)
        if fraction:
            # The more of the stage is done, the more its own rate counts.
            by_rate = elapsed * (1 - fraction) / fraction
            guess = fraction * by_rate + (1 - fraction) * guess
        later = [n for n in self.expected if n not in self.spent and n != current]
        return guess + pace * sum(self.expected[n] for n in later)


class Console:
    """Writes to a terminal (one live line, rewritten) or to a file (a progress line now and then)."""

    def __init__(self, time_left: TimeLeft, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.time_left = time_left
        self.live = self.stream.isatty()
        self.stage_name, self.stage_started = "", time.monotonic()
        self._shown, self._live_line = 0.0, False

    def stage(self, name: str, title: str, note: str = "") -> None:
        """Begin a stage; one with a note is only mentioned."""
        names = list(self.time_left.expected)
        head = f"[{names.index(name) + 1}/{len(names)}] {title}"
        if note:
            self.line(f"{head}: {note}", indent=0)
            return
        self.stage_name, self.stage_started = name, time.monotonic()
        self._shown = self.stage_started
        self.line(f"\n{head}", indent=0)

    def line(self, text: str, indent: int = 6) -> None:
        """Text that stays."""
        if self._live_line:
            self.stream.write("\r\x1b[2K")
            self._live_line = False
        self.stream.write("\n".join(" " * indent + part if part else "" for part in text.split("\n")) + "\n")
        self.stream.flush()

    def progress(self, what: str, fraction: float | None, text: str = "") -> None:
        """The live line: current activity, fraction done, time left over all stages."""
        now = time.monotonic()
        if now - self._shown < (REFRESH_SECONDS if self.live else QUIET_SECONDS):
            return
        self._shown = now
        elapsed = now - self.stage_started
        bar = ""
        if fraction is not None:
            full = round(20 * min(max(fraction, 0.0), 1.0))
            bar = f" {'█' * full + '░' * (20 - full)} {fraction:4.0%}"
        left = clock(self.time_left.left(self.stage_name, elapsed, fraction))
        shown = f"      {what}{bar}  {clock(elapsed)}, about {left} left in all" + (f"  {text}" if text else "")
        if self.live:
            width = shutil.get_terminal_size((100, 24)).columns - 1
            self.stream.write("\r\x1b[2K" + shown[:width])
            self._live_line = True
        else:
            self.stream.write(shown + "\n")
        self.stream.flush()
