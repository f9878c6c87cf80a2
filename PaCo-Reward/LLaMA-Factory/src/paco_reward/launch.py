"""`paco-reward train`: checks a configuration, then trains in this process or in several through torchrun."""

import logging
import os
import sys
from typing import Any

import torch

from paco_reward import overlay
from paco_reward.config import check_combinations, load_config, with_accumulation
from paco_reward.datasets import check_data
from paco_reward.environment import check_torchaudio
from paco_reward.families import with_template


def run(config_path: str, overrides: list[str], environment: dict[str, str]) -> int:
    """Check a training configuration, then run it here or let torchrun replace this process; returns the exit status."""
    config = load_config(config_path, overrides)
    check_torchaudio()
    check_data(config)
    config = with_template(config)
    check_combinations(config)
    weight, scheme = (
        config.get("first_token_weight"),
        config.get("first_token_scheme") or "sequence",
    )
    print(f"template: {config['template']}")
    print(
        f"loss: first_token_weight {weight} (None: LLaMA-Factory's own), {scheme} (published: released)",
        flush=True,
    )
    if command := torchrun_command(config, config_path, overrides, environment):
        print(" ".join(command), flush=True)
        os.execve(
            command[0], command, environment
        )  # signals to this process, as a scheduler's, are for torchrun
    train(config)
    return 0


def train(config: dict[str, Any]) -> None:
    """Train in this process: the only one, or one of torchrun's."""
    from llamafactory.train.tuner import run_exp

    overlay.install()
    run_exp(with_accumulation(with_template(config), int(os.environ.get("WORLD_SIZE", "1"))))


def torchrun_command(
    config: dict[str, Any], config_path: str, overrides: list[str], environment: dict[str, str]
) -> list[str] | None:
    """The torchrun command of this node, or None when one plain process is enough."""
    # On a CPU the default is two processes: with small models they use two cores better than two threads.
    nodes = int(environment.get("NNODES", "1"))
    processes = int(
        environment.get("NPROC_PER_NODE")
        or torch.cuda.device_count()
        or min(2, os.cpu_count() or 1)
    )
    if nodes == 1 and processes == 1 and not config.get("deepspeed"):
        return None
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc_per_node={processes}",
    ]
    if nodes == 1 and "MASTER_PORT" not in environment:
        command.append("--standalone")  # on a free port: concurrent trainings
    else:
        names = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        command += [
            f"--{name.lower()}={environment.get(name, default)}" for name, default in names.items()
        ]
    return [*command, "-m", "paco_reward.launch", config_path, *overrides]


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    train(load_config(sys.argv[1], sys.argv[2:]))
