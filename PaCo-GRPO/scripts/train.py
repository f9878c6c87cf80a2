"""Train: ``python scripts/train.py --config config/grpo.py:NAME [--config.a.b=value …]`` (or a saved config.yaml).

``--no_user_code``: refuse a configuration that names code outside this repository.

Usually started by scripts/single_node/*.sh through ``accelerate launch``. All options: docs/configuration.md.
"""

import logging
import os
import sys


def main(arguments: list[str]) -> int:
    """Run to the end; returns the exit status: 0 done, 2 refused, 3 stopped with state saved, 128+n by signal n."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if is_main else logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of faster kernels wherever it is imported

    from paco_grpo.options import ConfigError, read_options

    try:
        options, name = read_options(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return train(options, name)


def train(options, name: str) -> int:
    """Build and train; the heavy imports wait until the options are known to be readable."""
    from paco_grpo.training.build import REFUSALS, build_run
    from paco_grpo.training.checks import is_disk_full
    from paco_grpo.training.trainer import Trainer, TrainingStopped

    try:
        trainer = Trainer(build_run(options, name))
        name = trainer.options.run_name
        trainer.fit()
    except TrainingStopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number if stopped.signal_number else 3
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(
            f"error: the disk is full ({error}); finished checkpoints are intact. Free some space, then: the same command "
            f"with --config.run_name={name} --config.resume_from=latest",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
