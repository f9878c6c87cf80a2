"""Communication between the processes of a run, and the default way to share weights and gradients.

Every function that takes an ``Accelerator`` is a collective operation: all processes call it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from paco_grpo.policies.base import Policy

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Decision = TypeVar("Decision")


class Stopped(Exception):
    """A loop ended because a process was asked to stop."""


class ProcessError(RuntimeError):
    """An error of one process, raised on all of them."""


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """True on every process if ``flag`` is true on at least one."""
    if accelerator.num_processes == 1:
        return flag
    total = accelerator.reduce(
        torch.tensor([float(flag)], device=accelerator.device), reduction="sum"
    )
    return bool(total.item() > 0)


def main_decides(accelerator: Accelerator, decide: Callable[[], Decision]) -> Decision:
    """What ``decide`` returns, or raises, on the main process, on every process.

    On a network file system, processes may see different states of a folder, and then wait for each
    other forever.
    """
    decision = None
    problem = None
    if accelerator.is_main_process:
        try:
            decision = decide()
        except Exception as error:  # noqa: BLE001 - raised below, on every process
            # Other exceptions may not survive pickling.
            is_sent = isinstance(error, (RuntimeError, ValueError, OSError))
            problem = error if is_sent else RuntimeError(f"{type(error).__name__}: {error}")
    if accelerator.num_processes > 1:
        decision, problem = broadcast_object_list([decision, problem])
    if problem:
        raise problem
    return decision


def gather_rows(local: np.ndarray, total: int) -> np.ndarray:
    """Rows (total, columns) of all processes in global order.

    ``local`` are the rows r, r + P, … of process r of P.
    """
    return interleave(gather_object([local]), total)


def interleave(parts: Sequence[np.ndarray], total: int) -> np.ndarray:
    """The rows of each process in global order: process r of P has the positions r, r + P, …"""
    rows = np.empty((total, parts[0].shape[1]))
    for process, part in enumerate(parts):
        rows[process :: len(parts)] = part
    return rows


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one plain tensor without gradient; a collective operation if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``value`` sharded and placed like ``target``, without communication.

    It is the same full tensor on every process.
    """
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def trains_transformer(policy: Policy) -> bool:
    """Whether all weights of the transformer are trained, instead of a LoRA."""
    return all(parameter.requires_grad for parameter in policy.transformer.parameters())


def make_float32(module: torch.nn.Module) -> None:
    """Cast the weights of ``module`` that are not sharded yet, as training needs them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.float()


class Strategy:
    """How weights, gradients and optimizer states are spread over the processes.

    Here every process has all of them. The mathematics does not depend on it.

    Losses are divided by the number of kept samples of all processes, so a strategy *sums*
    gradients. This one does it once per optimizer step: LoRA gradients are small, so one message
    costs less than hooks on every backward.
    """

    name = "replicated"  # in plan.json
    # Whether a forward or backward is a collective operation: every process must run equally many.
    lockstep = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    def loading_device(self) -> torch.device:
        """Where the generator is before ``place``."""
        return self.accelerator.device

    def place(self, policy: Policy) -> None:
        """Move a policy with its adapters to where it computes, and make trained weights float32."""
        if trains_transformer(policy):
            make_float32(policy.transformer)

    def synced_batches(
        self, batches: Sequence[Batch], dummy: Batch, should_stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Batch, bool]]:
        """This process's ``batches`` as (batch, is_dummy).

        In lockstep, every process gets as many as the one with the most: it gets ``dummy``, whose
        result is dropped, while only others have a batch. ``should_stop`` is as in
        ``unless_stopped``.
        """
        count = len(batches)
        if self.lockstep:
            counts = torch.tensor([count], device=self.accelerator.device)
            count = int(self.accelerator.gather(counts).max())
        entries = [(batch, False) for batch in batches]
        entries += [(dummy, True)] * (count - len(batches))
        yield from self.unless_stopped(entries, should_stop)

    def unless_stopped(
        self, batches: Sequence[Batch], should_stop: Callable[[], bool] | None
    ) -> Iterator[Batch]:
        """The ``batches``; in lockstep, every process has equally many.

        ``should_stop`` is asked before each batch, and ends the loop with ``Stopped``: in lockstep
        on every process at the same batch, otherwise where it is true (see ``same_outcome``).
        """
        for batch in batches:
            if should_stop is not None:
                stop = should_stop()
                if self.lockstep:
                    stop = any_process(self.accelerator, stop)
                if stop:
                    raise Stopped
            yield batch

    @contextmanager
    def same_outcome(self) -> Iterator[None]:
        """What ends the block early on one process ends it on every process.

        Inside, no process may wait for another: one that has failed would keep them waiting. So in
        lockstep, errors stay where they are, and the launcher ends the other processes.

        Raises:
            Stopped: A process was asked to stop.
            ProcessError: A process has failed; the message is its error.
        """
        if self.lockstep or self.accelerator.num_processes == 1:
            yield
            return
        problem = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, on every process
            problem = error
        text = None if problem is None else f"{type(problem).__name__}: {problem}"
        outcomes = gather_object([(isinstance(problem, Stopped), text)])
        if any(stopped for stopped, _ in outcomes):
            raise Stopped
        texts = [text for _, text in outcomes if text is not None]
        if texts:
            raise ProcessError(texts[0]) from problem

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Sum the gradients of all processes in place and clip them.

        Returns:
            The norm before clipping, 0-dim.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.accelerator.num_processes > 1:
            flat = torch.cat([p.grad.float().flatten() for p in parameters])
            flat = self.accelerator.reduce(flat, reduction="sum")
            sums = flat.split([p.numel() for p in parameters])
            for parameter, summed in zip(parameters, sums, strict=True):
                parameter.grad.copy_(summed.view_as(parameter))
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


class StopSignal:
    """SIGTERM, SIGINT and SIGHUP (a closed terminal): save and exit at the next safe point."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are installed inside the block."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            self._time = time.monotonic()
            name = signal.Signals(number).name
            logger.warning("%s received: saving and exiting at the next safe point", name)
        # Launchers forward one Ctrl-C as several signals: only a later one means "now".
        elif number == signal.SIGINT and time.monotonic() - self._time > 2:
            raise KeyboardInterrupt
