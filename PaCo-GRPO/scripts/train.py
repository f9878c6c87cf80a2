"""Train a generator.

``python scripts/train.py --config config/grpo.py:NAME [--config.a.b=value …]``, or a saved
config.yaml. Usually started by scripts/single_node/*.sh. With ``--help`` after NAME, its options
are checked and listed with their values. All options: docs/configuration.md.

Exit status: 0 done, 2 refused before training, 3 stopped with state saved, 4 failed while training
with one message, 128+n ended by signal n.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paco_grpo.options import RunOptions
    from paco_grpo.training.trainer import Trainer


def main(arguments: list[str]) -> int:
    """Run to the end; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2

    from paco_grpo.commands import start_logging
    from paco_grpo.options import ConfigError, describe_options, read_options
    from paco_judge.errors import end_with_parent, print_error

    if "LOCAL_RANK" in os.environ:
        end_with_parent()  # otherwise, this process would train on alone without its launcher
    is_main = start_logging("%(asctime)s %(message)s")
    try:
        options, name = read_options([word for word in arguments if word != "--help"])
    except ConfigError as error:
        print_error(f"error: {error}")
        return 2
    if "--help" in arguments:
        if is_main:
            print(describe_options(options))
        return 0
    return train(options, name, is_main)


def train(options: RunOptions, name: str, is_main: bool = True) -> int:
    """Build and train; the heavy imports wait until the options are known to be readable."""
    from paco_grpo.training.build import build_run
    from paco_grpo.training.checks import require_promised_gpu
    from paco_grpo.training.stopping import TrainingStopped
    from paco_grpo.training.trainer import Trainer
    from paco_judge.errors import UserError, print_error

    trainer = None
    try:
        require_promised_gpu(os.environ)
        trainer = Trainer(build_run(options, name))
        trainer.fit()
    except TrainingStopped as stopped:  # the log says why
        return 128 + stopped.signal_number if stopped.signal_number else 3
    except KeyboardInterrupt:  # before training, or a second one, which does not wait
        again = resume_command(trainer)
        if is_main:
            print(f"interrupted: nothing was saved. {again}".rstrip(), file=sys.stderr)
        return 130
    except UserError as error:
        again = resume_command(trainer)
        print_error(f"error: {error}{f'. Then: {again}' if again else ''}")
        return 4 if again else 2
    return 0


def resume_command(trainer: Trainer | None) -> str:
    """What continues the run, in words; empty if no epoch has begun."""
    if trainer is None or not trainer.epochs_begun:
        return ""
    run_name = trainer.options.run_name
    return f"resume with --config.run_name={run_name} --config.resume_from=latest"


if __name__ == "__main__":
    from paco_judge.errors import end_process

    end_process(main(sys.argv[1:]))
