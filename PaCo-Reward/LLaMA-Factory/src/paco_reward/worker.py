"""One training process: installs the overlay in LLaMA-Factory and trains. Run by `paco-reward train`, or by hand:

torchrun --nproc_per_node 2 -m paco_reward.worker CONFIG [key=value …]
"""

import logging
import os
import sys
from typing import Any

from paco_reward import overlay
from paco_reward.config import check_combinations, load_config, with_accumulation
from paco_reward.families import with_template


def train(config: dict[str, Any]) -> None:
    """Train with a configuration in this process."""
    from llamafactory.train.tuner import run_exp

    config = with_template(config)
    check_combinations(config)
    overlay.install()
    run_exp(with_accumulation(config, int(os.environ.get("WORLD_SIZE", "1"))))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    train(load_config(sys.argv[1], sys.argv[2:]))
