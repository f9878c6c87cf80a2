"""Seconds of each phase of an epoch, images a second, memory, as one line of JSON.

    # any configuration and its model
    python benchmarks/epoch.py --config config/grpo.py:toy_t2is
    # FLUX.1-dev's size, no download
    python benchmarks/epoch.py --config config/grpo.py:t2is_80gb --random_weights

The trainer's own epochs run on the configuration's data, and its metrics are read: those of a run
of your own are in its metrics.jsonl. The reward is the size of the JPEG file, so that no judge is
needed. ``--repeats`` epochs follow one that warms up, and numbers are medians. For several
processes start it with torchrun.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paco_grpo.commands import parse_beside_options
from paco_judge.arguments import Parser
from paco_judge.errors import run_command

# Options of a run that only trains.
CHANGES = {
    "logging_platform": "none",
    "eval_freq": 0,
    "health.probe_images": 0,
    "enable_mem_log": True,
    "train.reward_fn": {"jpeg_compressibility": 1.0},
    "train.reward_fn_kwargs": {},
    "train.aggregate_fn": None,
    "test.reward_fn": {},
    "test.reward_fn_kwargs": {},
}


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=style)
    parser.add_argument("--random_weights", action="store_true", help="at the real size")
    parser.add_argument("--repeats", type=int, default=3, help="measured epochs")
    arguments, rest = parse_beside_options(parser, words)

    def command() -> None:
        print(json.dumps(measure(read(rest), arguments.repeats, arguments.random_weights)))

    return run_command(command)


def read(words: Sequence[str], changes: Mapping[str, Any] = {}) -> Any:
    """Options of a command line for a run that only trains, with ``changes``."""
    from paco_grpo.options import read_options

    texts = [f"--config.{name}={value}" for name, value in (CHANGES | changes).items()]
    return read_options([*words, *texts])[0]


def measure(options: Any, repeats: int, with_random_weights: bool) -> dict[str, Any]:
    """Medians of the epochs' metrics; empty on processes other than the main one."""
    from paco_grpo.architectures import random_weights, write
    from paco_grpo.training.build import build_run
    from paco_grpo.training.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pretrained = options.pretrained
        if with_random_weights:
            stack.enter_context(random_weights(pretrained.model))
            model = write(pretrained.model, Path(folder) / "model")
            pretrained = dataclasses.replace(pretrained, model=str(model))
        options = dataclasses.replace(
            options, save_dir=folder, run_name="run", pretrained=pretrained
        )
        run = build_run(options)
        trainer = Trainer(run)
        for _ in range(1 + repeats):
            trainer.epoch()
        rows = run.metrics.rows("train")[1:]  # none on other processes
        run.close()
    figures = {}
    for key in rows[0] if rows else ():
        if key.startswith(("time/", "memory/", "train/ratio_deviation")):
            figures[key] = statistics.median(row[key] for row in rows)
    if figures:
        figures["images_per_second"] = run.plan.samples / figures["time/epoch_s"]
    return figures


if __name__ == "__main__":
    sys.exit(main())
