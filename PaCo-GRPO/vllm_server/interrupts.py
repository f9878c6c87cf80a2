"""SIGINT, SIGTERM and SIGHUP as exceptions, held back where an exception would leave a process behind."""

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(Exception):
    """A signal asked the launch to end."""


class Interrupts:
    """Whether a signal raises now, or is remembered."""

    def __init__(self):
        self._holding, self._received = False, None

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals are remembered meanwhile; ``release`` raises them."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def hold(self) -> None:
        """From here on signals are remembered, until ``let_go``."""
        self._holding = True

    def let_go(self) -> None:
        """End ``hold``; a signal that came meanwhile is raised now."""
        self._holding = False
        self.release()

    def release(self) -> None:
        """Raise the signal that came while they were held, if any."""
        if self._received is not None:
            raise Interrupted(self._received)

    def _handle(self, number: int, frame: object) -> None:
        if self._holding:
            self._received = signal.Signals(number).name
        else:
            raise Interrupted(signal.Signals(number).name)
