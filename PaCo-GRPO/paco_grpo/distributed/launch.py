"""The processes of a run as the launcher started them: strategy, signals."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs

from paco_grpo.distributed.fsdp2 import FSDP2
from paco_grpo.distributed.processes import Strategy
from paco_grpo.options import ConfigError, RunOptions

logger = logging.getLogger(__name__)


def start_processes(options: RunOptions) -> Strategy:
    """The strategy over the processes that the launcher started."""
    # Mixed precision is the policy's own (one autocast for rollout and training), so accelerate
    # gets none.
    # Processes wait for each other's rewards, which may take longer than the default timeout.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))])
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
