"""The processes of a run: communication between them, and the default way to share weights and gradients.

Every function that takes an ``Accelerator`` is a collective operation: all processes call it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from paco_grpo.policies.base import Policy

Batch = TypeVar("Batch")
Value = TypeVar("Value")
_loops = itertools.count()  # of ``until_stopped``; equal on all processes
Decision = TypeVar("Decision")


class Stopped(Exception):
    """A loop ended because a process was asked to stop."""


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """True on every process if ``flag`` is true on at least one."""
    if accelerator.num_processes == 1:
        return flag
    total = accelerator.reduce(torch.tensor([float(flag)], device=accelerator.device), reduction="sum")
    return bool(total.item() > 0)


def main_decides(accelerator: Accelerator, decide: Callable[[], Decision]) -> Decision:
    """What ``decide`` returns, or raises, on the main process, on every process; a collective operation.

    Files are read this way where they decide how a run goes on: on a network file system processes may see different
    states of a folder, and processes that decide differently wait for each other forever.
    """
    if accelerator.num_processes == 1:
        return decide()
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome = [decide(), None]
        except (RuntimeError, ValueError, OSError) as error:  # all that is reported to users
            outcome = [None, error]
        except Exception as error:
            # Its type may not survive pickling; the main process shows it with its place.
            broadcast_object_list([None, RuntimeError(f"on the main process: {type(error).__name__}: {error}")])
            raise
    decision, error = broadcast_object_list(outcome)
    if error is not None:
        raise error
    return decision


def rounds(
    accelerator: Accelerator,
    batches: Sequence[Batch],
    *,
    should_stop: Callable[[], bool] | None = None,
    filler: Batch | None = None,
) -> Iterator[tuple[Batch, bool]]:
    """This process's ``batches``, in rounds that all processes go through together where that is needed.

    Without ``filler``, no process waits for another or for its GPU between batches.

    Args:
        accelerator: The processes; they may have different numbers of batches.
        batches: This process's batches.
        should_stop: Asked before each round; all processes end as soon as one answers True. None = never.
        filler: Yielded in the rounds in which only other processes have a batch, where a forward pass is a collective
            operation; None = these rounds are skipped.

    Yields:
        (batch, idle); ``idle`` is True for the filler, whose result is to be dropped.

    Raises:
        Stopped: On every process, because one was asked to stop.
    """
    count = len(batches)
    if accelerator.num_processes > 1 and filler is not None:
        count = int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())
    together = [(batch, False) for batch in batches] + [(filler, True)] * (count - len(batches))
    yield from until_stopped(accelerator, together, should_stop, filler is not None)


def until_stopped(
    accelerator: Accelerator, values: Iterable[Value], should_stop: Callable[[], bool] | None, in_step: bool
) -> Iterator[Value]:
    """``values`` until ``should_stop`` answers True, as in ``rounds``; ``in_step``: processes end at the same value.

    Raises:
        Stopped: On every process, because one was asked to stop.
    """
    if should_stop is None:
        yield from values
        return
    # A key in the store that the processes met at: to read it involves no GPU.
    key, stop = f"paco_grpo/stop/{next(_loops)}", False
    alone = accelerator.num_processes == 1
    store = None if alone or in_step else torch.distributed.distributed_c10d._get_default_store()
    for value in values:
        stop = any_process(accelerator, should_stop()) if in_step else should_stop()
        if store is not None and stop:
            store.set(key, "asked")
        elif store is not None:
            stop = store.check([key])
        if stop:
            break
        yield value
    if any_process(accelerator, stop):
        raise Stopped


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


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one plain tensor without gradient; a collective operation if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``value``, the same full tensor on every process, sharded and placed like ``target``; no communication."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


class Replicated:
    """How weights, gradients and optimizer states are spread over the processes; the mathematics does not depend on it.

    Losses are divided by the number of kept samples of all processes before they come here, so a strategy *sums*
    gradients. This one sums them once per optimizer step: LoRA gradients are small, so one message costs less than
    hooks on every backward.

    Attributes:
        name: For the log and plan.json.
        collective_forwards: A forward is a collective operation, so every process must run equally many.
        collective_backwards: The same for backwards.
    """

    name = "replicated"
    collective_forwards = False
    collective_backwards = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @property
    def loading_device(self) -> torch.device:
        """Where the generator is loaded before ``place``."""
        return self.accelerator.device

    def place(self, policy: Policy) -> None:
        """Move a policy with its adapters from ``loading_device`` to where it computes."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add the gradients of ``loss``; ``last``: the optimizer step comes next."""
        loss.backward()

    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], finite: torch.Tensor, max_norm: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of all processes in place, in one message, and clip them; nothing is read from the device.

        Args:
            parameters: All on one device; those without a gradient contribute zeros.
            finite: 0-dim bool tensor: whether all losses of this process are finite.
            max_norm: The gradients are scaled down to this norm.

        Returns:
            Whether ``finite`` was true on every process, and the norm before clipping (0-dim tensors).
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.accelerator.num_processes > 1:
            flag = (~finite).to(device=parameters[0].device, dtype=torch.float32).reshape(1)
            flat = torch.cat([p.grad.float().flatten() for p in parameters] + [flag])
            flat = self.accelerator.reduce(flat, reduction="sum")
            for parameter, summed in zip(parameters, flat[:-1].split([p.numel() for p in parameters]), strict=True):
                parameter.grad.copy_(summed.view_as(parameter))
            finite = flat[-1] == 0
        return finite, torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer: Any) -> None:
        """One optimizer step with the gradients of ``finish_gradients``, which are cleared."""
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def load_optimizer_state(self, optimizer: Any, saved: dict[str, Any]) -> None:
        """Restore a ``state_dict`` whose tensors are whole and on the CPU."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, entries in saved["state"].items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                    entries[name] = shard_like(value, parameters[index])
        optimizer.load_state_dict(saved)
