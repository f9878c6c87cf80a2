"""`paco-reward train`: checks a configuration, then trains here or in several processes."""

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from paco_reward import overlay
from paco_reward.config import (
    check_combinations,
    check_names,
    check_types,
    load_config,
    with_accumulation,
)
from paco_reward.datasets import check_data
from paco_reward.environment import check_torchaudio
from paco_reward.errors import TRAINING_ERRORS, PacoRewardError, report_errors
from paco_reward.families import model_type_of, with_template
from paco_reward.output import is_disk_full, locked, with_resume, write_config

logger = logging.getLogger(__name__)


def run(config_path: str, overrides: list[str], environment: Mapping[str, str]) -> int:
    """Check a training configuration, then run it; returns the exit status."""
    config = load_config(config_path, overrides)
    check_types(config)
    check_torchaudio()
    check_data(config)
    model_type = model_type_of(config)
    config = with_template(config)
    check_combinations(config)
    torchrun_arguments = plan_processes(config, environment)
    warn_of_slow_attention(config, model_type)
    describe(config)

    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    # Nodes that share the folder are one training.
    is_first_node = environment.get("NODE_RANK", "0") == "0"
    with locked(folder) if is_first_node else nullcontext():
        config = with_resume(config)
        file = write_config(folder, config)
        if torchrun_arguments is None:
            return train(config)
        return run_processes([*torchrun_arguments, "-m", "paco_reward.launch", str(file)])


def describe(config: dict[str, Any]) -> None:
    """Print what a reader of the log must know."""
    weight = config.get("first_token_weight")
    if weight is None:
        loss = "LLaMA-Factory's own (first_token_weight: null)"
    else:
        scheme = config.get("first_token_scheme", "sequence")
        loss = f"first-token weight {weight}, scheme {scheme}"
    print(f"template: {config['template']}\nloss: {loss}", flush=True)


def warn_of_slow_attention(config: dict[str, Any], model_type: str | None) -> None:
    """Say that Qwen2.5-VL's tower runs one window of an image at a time without FlashAttention."""
    if model_type != "qwen2_5_vl" or num_gpus(config) == 0:
        return
    if config.get("flash_attn") not in ("fa2", "fa3"):
        logger.warning(
            "the vision tower of Qwen2.5-VL computes each window of an image by itself without "
            "FlashAttention, which is slow: pip install flash-attn --no-build-isolation, and add "
            "flash_attn=fa2"
        )


def train(config: dict[str, Any]) -> int:
    """Train in this process: the only one, or one of torchrun's. Returns exit status 0.

    Raises:
        PacoRewardError: Among others, the disk is full.
    """
    from llamafactory.train.tuner import run_exp

    overlay.install()
    check_names(config)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        run_exp(with_accumulation(with_template(config), num_processes))
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise PacoRewardError(
            f"there is no room in {config['output_dir']} ({error}); free some space and repeat the "
            "command, which resumes from the last checkpoint"
        ) from error
    return 0


def num_gpus(config: dict[str, Any]) -> int:
    """GPUs that a training uses on this machine."""
    return 0 if config.get("use_cpu") else torch.cuda.device_count()


def plan_processes(config: dict[str, Any], environment: Mapping[str, str]) -> list[str] | None:
    """Options of torchrun on this node, or None when one plain process is enough."""
    nodes = _positive(environment, "NNODES", 1)
    # On a CPU the default is two: with small models they use two cores better than two threads do.
    default = num_gpus(config) or min(2, os.cpu_count() or 1)
    processes = _positive(environment, "NPROC_PER_NODE", default)
    if nodes == 1 and processes == 1 and not config.get("deepspeed"):
        return None
    arguments = [f"--nnodes={nodes}", f"--nproc_per_node={processes}"]
    if nodes == 1 and "MASTER_PORT" not in environment:
        return [*arguments, "--standalone"]  # on a free port: concurrent trainings
    defaults = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, default_value in defaults.items():
        arguments.append(f"--{name.lower()}={environment.get(name, default_value)}")
    return arguments


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) == 0:
        raise PacoRewardError(f"the variable {name} is a number from 1, not {text!r}")
    return int(text)


def run_processes(arguments: list[str]) -> int:
    """Run torchrun in this process, whose lock and signals are for all; returns the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    print(f"{sys.executable} -m torch.distributed.run {' '.join(arguments)}", flush=True)
    try:
        torchrun(arguments)
    except ChildFailedError:  # the process that failed has said why
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def main(config_path: str) -> int:
    """One of torchrun's processes. Returns the exit status."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("paco_reward").setLevel(logging.INFO)
    parent_death_signal = 1  # PR_SET_PDEATHSIG: nothing trains on when torchrun was killed
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    return report_errors(lambda: train(load_config(config_path)), TRAINING_ERRORS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
