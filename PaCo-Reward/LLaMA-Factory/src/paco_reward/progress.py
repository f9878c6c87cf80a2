"""One line per logging step, with the time left; for runs whose log is read later rather than watched."""

import logging
import time
from datetime import timedelta
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class ProgressLines(TrainerCallback):
    """`step 100/600  loss 0.412  elapsed 0:00:45  left 0:03:45`, from the first process only."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            logger.info("training: %d steps", state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        if "loss" not in numbers:
            shown = [f"{name} {value:.4g}" for name, value in numbers.items() if name.startswith("eval_")]
            if shown:
                logger.info("%s", "  ".join(shown))
            return
        elapsed, done = time.monotonic() - self.started, state.global_step - self.first
        left = elapsed / max(done, 1) * (state.max_steps - state.global_step)
        clock = [str(timedelta(seconds=round(seconds))) for seconds in (elapsed, left)]
        logger.info(
            "step %d/%d  loss %.4f  elapsed %s  left %s", state.global_step, state.max_steps, numbers["loss"], *clock
        )
