"""One training process: installs the overlay in LLaMA-Factory and trains. Run by `paco-reward train`, or by hand:

torchrun --nproc_per_node 2 -m paco_reward.worker CONFIG [key=value …]
"""

import logging
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from paco_reward import overlay
from paco_reward.config import GLOBAL_BATCH, check_combinations, check_keys, load_config, with_accumulation
from paco_reward.errors import PacoRewardError
from paco_reward.families import with_template

logger = logging.getLogger("paco_reward.worker")  # __name__ is __main__ under torchrun

ERROR_FILE = "PACO_REWARD_ERROR_FILE"  # set by `paco-reward train`: where the first process writes its error


class ProgressLines(TrainerCallback):
    """`step 100/600  loss 0.412  elapsed 0:00:45  left 0:03:45`, from the first process only."""

    def __init__(self, global_batch_size: int | None = None) -> None:
        """``global_batch_size``: of the configuration; a batch that differs from it is reported."""
        self.wanted = global_batch_size

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first = time.monotonic(), state.global_step
        if not state.is_world_process_zero:
            return
        parts = (args.world_size, args.per_device_train_batch_size, args.gradient_accumulation_steps)
        batch = math.prod(parts)
        text = "training: %d steps of %d sequences: %d processes x %d per device x %d accumulated"
        logger.info(text, state.max_steps, batch, *parts)
        if self.wanted not in (None, batch):
            logger.warning("a step has %d sequences instead of global_batch_size: %d", batch, self.wanted)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        if "loss" not in numbers:
            shown = [f"{name} {value:.4g}" for name, value in numbers.items() if name.startswith("eval_")]
            if shown:
                logger.info("%s", "  ".join(shown))
            return
        step, steps = state.global_step, state.max_steps
        elapsed = time.monotonic() - self.started
        left = elapsed / max(step - self.first, 1) * (steps - step)
        clock = [str(timedelta(seconds=round(seconds))) for seconds in (elapsed, left)]
        logger.info("step %d/%d  loss %.4f  elapsed %s  left %s", step, steps, numbers["loss"], *clock)


def train(config: dict[str, Any]) -> None:
    """Train with a configuration in this process."""
    config = with_template(config)
    check_combinations(config)
    overlay.install()
    check_keys(config, overlay.train_arguments())
    progress = ProgressLines(config.get(GLOBAL_BATCH))
    overlay.run_training(with_accumulation(config, int(os.environ.get("WORLD_SIZE", "1"))), [progress])


def main(arguments: list[str] | None = None) -> int:
    """Entry point of each torchrun process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("paco_reward").setLevel(logging.INFO)
    try:
        train(load_config(arguments[0], arguments[1:]))
    except PacoRewardError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr)
            if ERROR_FILE in os.environ:
                Path(os.environ[ERROR_FILE]).write_text(str(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
