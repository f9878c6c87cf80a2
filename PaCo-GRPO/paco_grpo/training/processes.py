"""What the processes of a run agree on, and how a run is asked to stop."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

import numpy as np
import torch
from accelerate import Accelerator

logger = logging.getLogger(__name__)


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """True on every process if ``flag`` is true on at least one. Every process must call it."""
    if accelerator.num_processes == 1:
        return flag
    total = accelerator.reduce(torch.tensor([float(flag)], device=accelerator.device), reduction="sum")
    return bool(total.item() > 0)


class Turns:
    """Lets processes with different numbers of batches stop together: one short message after each batch.

    Args:
        accelerator: The processes.
        wants_to_stop: Whether this process was asked to stop.
    """

    def __init__(self, accelerator: Accelerator, wants_to_stop: Callable[[], bool]) -> None:
        self.accelerator, self.wants_to_stop = accelerator, wants_to_stop

    def stop_after_batch(self) -> bool:
        """After each batch of this process: whether any process wants to stop."""
        return self._ask(busy=True)[0]

    def stop_after_last(self) -> bool:
        """After the last batch of this process: takes part until all are done; True if one wants to stop."""
        while True:
            stop, busy = self._ask(busy=False)
            if stop or not busy:
                return stop

    def _ask(self, busy: bool) -> tuple[bool, bool]:
        flags = (self.wants_to_stop(), busy)
        if self.accelerator.num_processes == 1:
            return flags
        mine = torch.tensor([float(flag) for flag in flags], device=self.accelerator.device)
        stop, busy = (value > 0 for value in self.accelerator.reduce(mine, reduction="sum").tolist())
        return stop, busy


def gather_rows(accelerator: Accelerator, local: np.ndarray, total: int) -> np.ndarray:
    """Rows of all processes in global order, when process r of P holds rows r, r + P, … of ``total``.

    Args:
        accelerator: The processes.
        local: (n_r, columns) float64; NaN allowed.
        total: Number of rows over all processes; needs no divisibility.

    Returns:
        (total, columns) float64 on every process: each row once, padding dropped.
    """
    processes = accelerator.num_processes
    if processes == 1:
        return local
    share = -(-total // processes)
    padded = np.full((share, local.shape[1]), np.nan)
    padded[: len(local)] = local
    stacked = accelerator.gather(torch.from_numpy(padded).to(accelerator.device)).cpu().numpy()
    by_row = stacked.reshape(processes, share, -1).transpose(1, 0, 2).reshape(processes * share, -1)
    return by_row[:total]


def sum_gradients(accelerator: Accelerator, parameters: Iterable[torch.nn.Parameter], finite: bool) -> bool:
    """Sum the gradients of all processes in place; in one message, together with whether every loss was finite.

    The losses are already divided by the global number of kept samples, so the sum is the global mean. A process
    without a micro-batch takes part with zeros. LoRA gradients are small, so one message an optimizer step costs less
    than hooks on every backward, and processes need not have the same number of micro-batches.

    Returns:
        Whether ``finite`` was true on every process.
    """
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if accelerator.num_processes == 1:
        return finite
    flat = torch.cat([p.grad.float().flatten() for p in parameters] + [parameters[0].new_tensor([float(not finite)])])
    flat = accelerator.reduce(flat, reduction="sum")
    offset = 0
    for parameter in parameters:
        count = parameter.numel()
        parameter.grad.copy_(flat[offset : offset + count].view_as(parameter))
        offset += count
    return bool(flat[-1].item() == 0)


class StopSignal:
    """SIGTERM or SIGINT ask the run to save and leave at the next safe point."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are in place inside."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Launchers pass one Ctrl-C on as several signals: only a later one means "now".
        if self.received is not None and number == signal.SIGINT and time.monotonic() - self._time > 2:
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._time = number, time.monotonic()
            logger.warning("%s received: saving and leaving at the next safe point", signal.Signals(number).name)


def set_threads(num_threads: int | None, num_processes: int) -> int:
    """Set and return the CPU threads of this process.

    Args:
        num_threads: ``config.num_threads``; None = this machine's cores / its processes, but not more than
            OMP_NUM_THREADS allows.
        num_processes: Of the run; torchrun's LOCAL_WORLD_SIZE says how many of them are on this machine.
    """
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if num_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = max(1, min(torch.get_num_threads(), cores // num_processes))
    torch.set_num_threads(num_threads)
    return num_threads
