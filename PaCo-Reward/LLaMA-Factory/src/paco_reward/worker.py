"""One training process: puts the overlay into LLaMA-Factory and trains. Run by `paco-reward train`, or by hand:

torchrun --nproc_per_node 2 -m paco_reward.worker CONFIG [key=value …]
"""

import logging
import os
import sys
from pathlib import Path

from paco_reward.config import check_combinations, check_keys, load_config
from paco_reward.errors import PacoRewardError

ERROR_FILE = "PACO_REWARD_ERROR_FILE"  # set by `paco-reward train`: where the first process leaves its last words


def train(config: dict) -> None:
    """Train with a configuration in this process."""
    from paco_reward import overlay
    from paco_reward.progress import ProgressLines

    check_combinations(config)
    overlay.install()
    check_keys(config, overlay.train_arguments())
    overlay.run_training(config, [ProgressLines()])


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
