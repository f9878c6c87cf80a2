"""Communication between the processes of a run, and full tensors from sharded ones.

Every function that takes an ``Accelerator`` is a collective operation: all processes call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

Batch = TypeVar("Batch")


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """True on every process if ``flag`` is true on at least one."""
    if accelerator.num_processes == 1:
        return flag
    total = accelerator.reduce(torch.tensor([float(flag)], device=accelerator.device), reduction="sum")
    return bool(total.item() > 0)


def largest_count(accelerator: Accelerator, count: int) -> int:
    """The largest ``count`` over all processes."""
    if accelerator.num_processes == 1:
        return count
    return int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())


def rounds(
    accelerator: Accelerator,
    batches: Sequence[Batch],
    *,
    should_stop: Callable[[], bool] | None = None,
    filler: Batch | None = None,
) -> Iterator[tuple[Batch, bool]]:
    """This process's ``batches``, in rounds that all processes go through together where that is needed.

    Args:
        accelerator: The processes; they may have different numbers of batches.
        batches: This process's batches.
        should_stop: Asked before each round; all processes end as soon as one answers True. None = never.
        filler: Yielded in the rounds in which only other processes have a batch, where a forward pass is a collective
            operation; None = these rounds are skipped.

    Yields:
        (batch, idle); ``idle`` is True for the filler, whose result is to be dropped.

    Raises:
        Stopped: A process asked to stop.
    """
    together = should_stop is not None or filler is not None
    for number in range(largest_count(accelerator, len(batches)) if together else len(batches)):
        if should_stop is not None and any_process(accelerator, should_stop()):
            raise Stopped
        if number < len(batches):
            yield batches[number], False
        elif filler is not None:
            yield filler, True


class Stopped(Exception):
    """A loop ended because a process was asked to stop."""


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


def sum_gradients(accelerator: Accelerator, parameters: Iterable[nn.Parameter], finite: torch.Tensor) -> torch.Tensor:
    """Sum the gradients of all processes in place, in one message, together with whether every loss was finite.

    A process without a micro-batch contributes zeros.

    Args:
        accelerator: The processes.
        parameters: All on one device; the same on every process.
        finite: 0-dim bool tensor of this process.

    Returns:
        0-dim bool tensor: whether ``finite`` was true on every process.
    """
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if accelerator.num_processes == 1:
        return finite
    flag = (~finite).to(device=parameters[0].device, dtype=torch.float32).reshape(1)
    flat = torch.cat([p.grad.float().flatten() for p in parameters] + [flag])
    flat = accelerator.reduce(flat, reduction="sum")
    offset = 0
    for parameter in parameters:
        count = parameter.numel()
        parameter.grad.copy_(flat[offset : offset + count].view_as(parameter))
        offset += count
    return flat[-1] == 0


# --- sharded tensors (DTensor) ------------------------------------------------------------------------------------------


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


def save_transformer(transformer: nn.Module, folder: Path, write: bool) -> None:
    """Write ``transformer`` as diffusers reads it, whether or not it is sharded.

    Args:
        transformer: A diffusers model.
        folder: To write to.
        write: False: this process only takes part in gathering.
    """
    if not isinstance(transformer, FSDPModule):
        if write:
            transformer.save_pretrained(folder)
        return
    weights = {}
    for name, tensor in transformer.state_dict().items():
        value = full_tensor(tensor)
        if write:
            weights[name] = value.cpu()
    if not write:
        return
    # fully_shard prepends its own class to the model's; the copy that is written has the model's class.
    (model_class,) = (base for base in type(transformer).__bases__ if base is not FSDPModule)
    with torch.device("meta"):
        copy = model_class.from_config(transformer.config)
    copy.load_state_dict(weights, assign=True)
    copy.save_pretrained(folder)
