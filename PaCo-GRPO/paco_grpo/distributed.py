"""The processes of a run: how they communicate, and share weights and gradients.

``Strategy`` keeps whole weights on every process, ``FSDP2`` shards them (torch's ``fully_shard``).
Every function that takes an ``Accelerator`` is a collective operation: all processes call it.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.policies.lora import lora_parameters
from paco_judge.errors import UserError

logger = logging.getLogger(__name__)

# Processes wait for each other's rewards, which may take longer than the default timeout.
TIMEOUT = timedelta(hours=2)

Batch = TypeVar("Batch")
Decision = TypeVar("Decision")


class Stopped(Exception):
    """A loop ended because a process was asked to stop."""


class ProcessError(RuntimeError):
    """An error of one process, raised on all of them."""


class ProcessUserError(ProcessError, UserError):
    """A ``UserError`` of one process, raised on all of them."""


class ProcessOutOfMemory(ProcessError, torch.OutOfMemoryError):
    """One process's GPU is full; raised on all of them."""


@dataclass(frozen=True)
class Shares:
    """Which process has which of ``total`` images: number i of process r of P is at r + i·P.

    Images are counted in three ways. Three images of two prompts on two processes:

        position   item id   process   number
        0          7         0         0
        1          4         1         0
        2          7         0         1

    The *item id* says which item of the prompt sets an image is of; the images of one item are a
    group. The *position* is the image's place over all processes, the *number* that among the
    images of its process.
    """

    process: int  # this one
    processes: int
    total: int

    @classmethod
    def of(cls, accelerator: Accelerator, total: int) -> "Shares":
        """The shares of the processes of ``accelerator``."""
        return cls(accelerator.process_index, accelerator.num_processes, total)

    @property
    def positions(self) -> range:
        """Positions of this process's images, by number."""
        return range(self.process, self.total, self.processes)

    def owner(self, position: int) -> int:
        """The process that has the image at ``position``."""
        return position % self.processes

    def number_of(self, position: int) -> int:
        """The number of the image at ``position``, on the process that has it."""
        return position // self.processes


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


@contextmanager
def same_outcome(accelerator: Accelerator) -> Iterator[None]:
    """What ends the block early on one process ends it on every process.

    Inside, no process may wait for another: one that has failed would keep them waiting.

    Raises:
        Stopped: A process was asked to stop.
        ProcessError: One of several processes has failed; the message is its error. It is also a
            ``UserError``, or an ``OutOfMemoryError``, if that is one.
    """
    if accelerator.num_processes == 1:
        yield
        return
    problem = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, on every process
        problem = error
    outcome = None
    if isinstance(problem, Stopped):
        outcome = Stopped()
    elif isinstance(problem, UserError):
        outcome = ProcessUserError(str(problem))
    elif isinstance(problem, torch.OutOfMemoryError):
        outcome = ProcessOutOfMemory(str(problem))
    elif problem is not None:
        outcome = ProcessError(f"{type(problem).__name__}: {problem}")
    outcomes = [outcome for outcome in gather_object([outcome]) if outcome is not None]
    # Being asked to stop comes first.
    outcomes.sort(key=lambda outcome: isinstance(outcome, ProcessError))
    if outcomes:
        raise outcomes[0] from problem


def gather_rows(local: np.ndarray) -> np.ndarray:
    """Rows (N, columns) of all processes by position, from each process's by number (``Shares``)."""
    return interleave(gather_object([local]))


def interleave(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Rows (N, columns) by position, from those of each process by number (``Shares``)."""
    total = sum(map(len, parts))
    rows = np.empty((total, parts[0].shape[1]))
    for process, part in enumerate(parts):
        rows[Shares(process, len(parts), total).positions] = part
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
        """As the function ``same_outcome``, around forwards and backwards.

        In lockstep these wait for other processes. So there, errors stay where they are, and the
        launcher ends the other processes.
        """
        with contextlib.nullcontext() if self.lockstep else same_outcome(self.accelerator):
            yield

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


class FSDP2(Strategy):
    """The transformer's weights are sharded over the processes, block by block.

    With LoRA only the frozen base is sharded: adapters are small, float32 next to a bfloat16 base,
    and stay whole on every process. Without LoRA everything is sharded: parameters, gradients and
    optimizer.
    """

    name = "fsdp2"
    lockstep = True

    @property
    @override
    def loading_device(self) -> torch.device:
        """Main memory: a model that needs sharding may not fit on one device."""
        return torch.device("cpu")

    @override
    def place(self, policy: Policy) -> None:
        """Shard block by block: a device never holds more than its share and one block.

        Nor does main memory hold more than one block's float32 copy, if all weights are trained.
        """
        device = self.accelerator.device
        policy.device = device
        transformer = policy.transformer
        blocks = blocks_of(transformer)
        if not blocks:
            raise ConfigError(
                f"config.train.sharding='fsdp2': {type(transformer).__name__} does not name its "
                "blocks"
            )
        kept_whole = set(lora_parameters(policy).values())
        for parameter in kept_whole:
            parameter.data = parameter.data.to(device)
        trains_everything = trains_transformer(policy)
        mesh = _mesh(device.type, self.accelerator.num_processes)
        precision = MixedPrecisionPolicy()
        if trains_everything:
            precision = MixedPrecisionPolicy(
                param_dtype=gathered_dtype(policy),
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            )
        for module in (*blocks, transformer):
            if trains_everything:
                make_float32(module)
            fully_shard(
                module,
                mesh=mesh,
                ignored_params=kept_whole,
                reshard_after_forward=True,
                mp_policy=precision,
            )
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                # Sums, not means, and the only reduction that gloo supports.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    @override
    def finish_gradients(
        self, parameters: Sequence[torch.nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Gradients of sharded parameters were summed during the backward."""
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return super().finish_gradients(parameters, max_norm)
        return full_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


def blocks_of(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of a transformer of diffusers that are sharded, and gathered, one by one."""
    names = set(transformer._no_split_modules or transformer._repeated_blocks or ())
    return [module for module in transformer.modules() if type(module).__name__ in names]


def gathered_dtype(policy: Policy) -> torch.dtype:
    """The precision in which FSDP2 gathers trained weights.

    It is autocast's, which would cast gathered float32 weights, and keep the copies of all blocks
    for the backward pass: FLUX.1-dev's are 22 GiB. Krea 2's norms need float32.
    """
    return torch.float32 if policy.transformer._keep_in_fp32_modules else policy.dtype


def _mesh(device_type: str, processes: int) -> DeviceMesh:
    """(machines, processes of one), so that weights travel only inside a machine.

    Each machine then holds all shards. The mesh has one dimension if there is a single machine, if
    each machine has a single process, or if machines have different numbers of processes.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    is_even = set(gather_object([local])) == {local}
    if not is_even or local in (1, processes):
        return init_device_mesh(device_type, (processes,))
    shape = (processes // local, local)
    return init_device_mesh(device_type, shape, mesh_dim_names=("machines", "processes"))


def start_processes(options: RunOptions) -> Strategy:
    """The strategy over the processes that the launcher started."""
    # Mixed precision is the policy's own (one autocast for rollout and training), so accelerate
    # gets none.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)])
    return build_strategy(options, accelerator)


def build_strategy(options: RunOptions, accelerator: Accelerator) -> Strategy:
    """The strategy that ``config.train.sharding`` names."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"accelerate was started with {kind}; use MULTI_GPU, and "
            "config.train.sharding='fsdp2' to shard"
        )
    if options.train.sharding is None:
        return Strategy(accelerator)
    if accelerator.num_processes == 1:
        logger.warning(
            "config.train.sharding='fsdp2', but there is only one process: nothing is sharded"
        )
        return Strategy(accelerator)
    for option, value in (
        ("speed.compile", options.speed.compile),
        ("pretrained.quantize", options.pretrained.quantize),
    ):
        if value:
            raise ConfigError(
                f"config.{option} cannot be combined with config.train.sharding='fsdp2'"
            )
    return FSDP2(accelerator)
