"""Train: ``python scripts/train.py --config config/grpo.py:NAME [--config.a.b=value …]`` (or a saved config.yaml).

Usually started by scripts/single_node/*.sh through ``accelerate launch``.
"""

import errno
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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

    from paco_grpo.training.configuration import ConfigError, read_config

    try:
        config, name = read_config(arguments, ROOT / "config" / "base.py")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(config, name)


def run(config, name: str) -> int:
    """Build and train; the heavy imports wait until the configuration is known to be readable."""
    from paco_grpo.data.prompts import DataError
    from paco_grpo.policies import PolicyLoadError
    from paco_grpo.rewards.registry import RewardError
    from paco_grpo.training.checkpoint import CheckpointError
    from paco_grpo.training.configuration import ConfigError
    from paco_grpo.training.setup import build_run
    from paco_grpo.training.tracking import TrackingError
    from paco_grpo.training.trainer import Trainer, TrainingStopped
    from paco_judge.client import JudgeError

    try:
        Trainer(build_run(config, name)).train()
    except TrainingStopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number if stopped.signal_number else 3
    except (ConfigError, DataError, PolicyLoadError, RewardError, JudgeError, TrackingError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(
            f"error: the disk is full ({error}); checkpoints are whole. Free some space, then: the same command with "
            f"--config.run_name={config.run_name} --config.resume_from=latest",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
