"""Train: ``python scripts/train.py --config config/grpo.py:NAME [--config.a.b=value …]`` (or a saved config.yaml).

Usually started by scripts/single_node/*.sh. All options: docs/configuration.md. Exit status: 0 done, 2 refused before
training, 3 stopped with state saved, 4 failed while training with one message, 128+n ended by signal n.
"""

import logging
import os
import sys


def main(arguments: list[str]) -> int:
    """Run to the end; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    is_main = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_main else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

    from paco_grpo.options import ConfigError, read_options

    try:
        options, name = read_options(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return train(options, name)


def train(options, name: str) -> int:
    """Build and train; the heavy imports wait until the options are known to be readable."""
    from paco_grpo.training.build import USER_ERRORS, build_run
    from paco_grpo.training.checks import is_disk_full, require_promised_gpu
    from paco_grpo.training.trainer import Trainer, TrainingStopped

    trainer = None
    try:
        require_promised_gpu(os.environ)
        trainer = Trainer(build_run(options, name))
        trainer.fit()
    except TrainingStopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number if stopped.signal_number else 3
    except (*USER_ERRORS, OSError) as error:
        if isinstance(error, OSError) and not is_disk_full(error):
            raise
        full = (
            "the disk is full; finished checkpoints are intact: "
            if isinstance(error, OSError)
            else ""
        )
        again, began = "", trainer is not None and trainer.epochs_trained > 0
        if began:
            again = f". Then: the same command with --config.run_name={trainer.options.run_name} --config.resume_from=latest"
        print(f"error: {full}{error}{again}", file=sys.stderr)
        return 4 if began else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
