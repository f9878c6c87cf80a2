"""The processes of a run as the launcher started them: accelerator, strategy, threads, signals."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs

from paco_grpo.distributed.fsdp2 import FSDP2, fsdp2_of_accelerate
from paco_grpo.distributed.replicated import Replicated
from paco_grpo.distributed.zero import zero_of_accelerate
from paco_grpo.options import ConfigError, RunOptions

logger = logging.getLogger(__name__)


def build_accelerator() -> Accelerator:
    """The processes, as the launcher started them."""
    # Mixed precision is the policy's own (one autocast for rollout and training), so accelerate gets none.
    # Processes wait for each other's rewards, which may take longer than the default timeout.
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])


def build_strategy(options: RunOptions, accelerator: Accelerator) -> Replicated:
    """The strategy that accelerate was started with, or that ``config.train.sharding`` names.

    Raises:
        ConfigError: It is not supported, or contradicts another option.
    """
    strategy = _strategy(options, accelerator)
    if strategy.collective_forwards:
        _check_fsdp_compatibility(options)
    return strategy


def _strategy(options: RunOptions, accelerator: Accelerator) -> Replicated:
    kind, wanted = accelerator.distributed_type, options.train.sharding
    if kind == DistributedType.FSDP:
        return fsdp2_of_accelerate(accelerator)
    if kind == DistributedType.DEEPSPEED:
        for option, value in (("sharding", wanted), ("use_8bit_adam", options.train.use_8bit_adam)):
            if value:
                raise ConfigError(
                    f"config.train.{option}={value!r} cannot be combined with DeepSpeed, which accelerate was started "
                    "with; leave it out, or use another accelerate configuration"
                )
        return zero_of_accelerate(accelerator, options.train.max_grad_norm)
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"accelerate was started with {kind}, which is not supported; use one of the files in "
            "scripts/accelerate_configs"
        )
    for variable, file in (("ACCELERATE_USE_DEEPSPEED", "deepspeed_zero*.yaml"), ("ACCELERATE_USE_FSDP", "fsdp2.yaml")):
        if os.environ.get(variable) == "true" and accelerator.device.type == "cpu" and wanted is None:
            remedy = "; config.train.sharding='fsdp2' works on a CPU too" if "FSDP" in variable else ""
            logger.warning(
                "accelerate was started with %s, but falls back to plain data parallelism on a CPU: nothing is sharded%s",
                file, remedy,
            )  # fmt: skip
    if wanted == "fsdp2":
        if accelerator.num_processes > 1:
            return FSDP2(accelerator)
        logger.warning("config.train.sharding='fsdp2', but there is only one process: nothing is sharded")
    return Replicated(accelerator)


def _check_fsdp_compatibility(options: RunOptions) -> None:
    sample = options.sample
    for option, value, off, reason in (
        ("sample.tail_cache", sample.tail_cache, 0.0, "processes would skip different blocks, but gather all together"),
        ("sample.tail_weights", sample.tail_weights, None, "sharded weights cannot be copied in 8 bits"),
        ("speed.compile", options.speed.compile, False, "this combination is not supported yet"),
        ("pretrained.quantize", options.pretrained.quantize, None, "quantized weights cannot be sharded"),
    ):
        if value != off:
            raise ConfigError(f"config.{option}={value!r} cannot be combined with FSDP2: {reason}; set it to {off}")


def set_threads(num_threads: int | None, num_processes: int) -> int:
    """Set and return the CPU threads of this process.

    Args:
        num_threads: ``config.num_threads``; None = this machine's cores / its processes, but not more than
            OMP_NUM_THREADS allows.
        num_processes: Processes of the run; torchrun's LOCAL_WORLD_SIZE is the number on this machine.
    """
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if num_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = max(1, min(torch.get_num_threads(), cores // num_processes))
    torch.set_num_threads(num_threads)
    return num_threads


class StopSignal:
    """SIGTERM or SIGINT ask the run to save and exit at the next safe point."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._time = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handlers are installed inside the block."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Launchers forward one Ctrl-C as several signals: only a later one means "now".
        if self.received is not None and number == signal.SIGINT and time.monotonic() - self._time > 2:
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._time = number, time.monotonic()
            logger.warning("%s received: saving and exiting at the next safe point", signal.Signals(number).name)
