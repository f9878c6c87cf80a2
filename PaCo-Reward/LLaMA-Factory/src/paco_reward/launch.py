"""`paco-reward train`: checks a configuration, then trains here or in several processes."""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError

from paco_judge.errors import UserError, end_process, end_with_parent, run_command
from paco_judge.files import locked, write_atomically
from paco_judge.identity import UNRECORDED, Match, identity, match
from paco_reward import overlay
from paco_reward.config import check_combinations, check_options, load_config, with_accumulation
from paco_reward.datasets import check_data
from paco_reward.families import with_template

CONFIG_FILE = "train.yaml"  # the options that a training was started with
DATA = "dataset_content"  # among them: a hash, so that a resumed training notices other rows
MODEL = "model_content"  # and the identity of the model, and of the adapter that it starts from
STATE_FILE = "trainer_state.json"  # the last file that transformers writes into a checkpoint
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
# Without a traceback. Other errors come from inside LLaMA-Factory, where it helps.
TRAINING_ERRORS = (OSError, SafetensorError)

logger = logging.getLogger(__name__)


def run(config_path: str, overrides: list[str], environment: Mapping[str, str]) -> int:
    """Check a training configuration, then run it; returns the exit status."""
    config = load_config(config_path, overrides)
    for name in (DATA, MODEL):  # of a training whose train.yaml is repeated
        config.pop(name, None)
    overlay.install()
    check_options(config)
    config |= {DATA: check_data(config)}
    config = with_template(config)
    check_combinations(config)
    config |= {MODEL: weights_of(config)}
    torchrun_arguments = plan_processes(config, environment)

    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    rank = environment.get("NODE_RANK", "0")
    # Nodes that share the folder are one training: the first one locks it.
    with locked(folder) if rank == "0" else nullcontext():
        config = with_resume(config)
        file = folder / (CONFIG_FILE if rank == "0" else f".node-{rank}.yaml")
        write_atomically(file, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        if torchrun_arguments is None:
            status = train(config)
        else:
            status = run_processes([*torchrun_arguments, "-m", "paco_reward.launch", str(file)])
    if status == 0 and rank == "0" and config.get("do_train"):
        print(f"saved in {folder}; next: paco-reward accuracy, paco-reward export", flush=True)
    return status


def train(config: dict[str, Any]) -> int:
    """Train in this process: the only one, or one of torchrun's. Returns exit status 0."""
    from llamafactory.train.tuner import run_exp

    overlay.install()
    # The backward pass of cuDNN's attention, PyTorch's choice on H100 and newer, can return NaN for
    # padded batches (pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    config = with_template(config)
    for name in (DATA, MODEL):
        config.pop(name, None)
    run_exp(with_accumulation(config, num_processes))
    return 0


def plan_processes(config: dict[str, Any], environment: Mapping[str, str]) -> list[str] | None:
    """Options of torchrun on this node, or None when one plain process is enough."""
    nodes = int(environment.get("NNODES") or 1)
    # On a CPU the default is two: with small models they use two cores better than two threads do.
    num_gpus = 0 if config.get("use_cpu") else torch.cuda.device_count()
    default = num_gpus or min(2, os.cpu_count() or 1)
    processes = int(environment.get("NPROC_PER_NODE") or default)
    if nodes == 1 and processes == 1 and not config.get("deepspeed"):
        return None
    arguments = [f"--nnodes={nodes}", f"--nproc_per_node={processes}"]
    if nodes == 1 and "MASTER_PORT" not in environment:
        return [*arguments, "--standalone"]  # on a free port: concurrent trainings
    defaults = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, default_value in defaults.items():
        arguments.append(f"--{name.lower()}={environment.get(name, default_value)}")
    return arguments


def weights_of(config: dict[str, Any]) -> str | None:
    """The identity of what is trained (``paco_judge.identity``)."""
    adapters = str(config.get("adapter_name_or_path") or "").split(",")
    names = [name.strip() for name in adapters if name.strip()]
    return identity(config["model_name_or_path"], *names)


def with_resume(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the checkpoint that a repeated command continues.

    LLaMA-Factory alone silently takes the newest folder, even one that a kill cut off.

    Raises:
        UserError: The folder has a finished training without checkpoints.
    """
    chosen = config.get("resume_from_checkpoint")
    if chosen or config.get("overwrite_output_dir") or not config.get("do_train"):
        return config
    folder = Path(config["output_dir"])
    checkpoints = sorted(folder.glob("checkpoint-*"), key=_step_of)
    whole = [checkpoint for checkpoint in checkpoints if (checkpoint / STATE_FILE).is_file()]
    if whole:
        logger.info("resuming from %s", whole[-1])
        if not any(whole[-1].glob("optimizer.*")) and not any(whole[-1].glob("global_step*")):
            logger.warning("it has no optimizer state (save_only_model): the moments start at zero")
        _warn_of_changes(folder / CONFIG_FILE, config)
        return config | {"resume_from_checkpoint": str(whole[-1])}
    if not checkpoints and any((folder / name).is_file() for name in WEIGHTS):
        raise UserError(
            f"{folder} has trained weights and no checkpoints; set another output_dir, or "
            "overwrite_output_dir=true"
        )
    return config | {"overwrite_output_dir": True} if checkpoints else config


def _warn_of_changes(file: Path, config: dict[str, Any]) -> None:
    """Name the options that the training in ``file`` did not have.

    If it is finished, it ends at once and ignores them.
    """
    if not file.is_file():
        return
    before = yaml.safe_load(file.read_bytes())
    how_it_began = ("resume_from_checkpoint", "overwrite_output_dir")
    changed = []
    of_model = match(before.get(MODEL, UNRECORDED), config.get(MODEL))
    if of_model not in (Match.SAME, Match.DIFFERENT):
        logger.warning(
            "whether %s was trained on the same model is unknown (%s)", file.parent, of_model.value
        )
        before[MODEL] = config.get(MODEL)
    for key in sorted(before | config):
        if before.get(key) != config.get(key) and key not in how_it_began:
            changed.append(key)
    if changed:
        logger.warning(
            "%s is resumed with another %s; overwrite_output_dir=true starts over",
            file.parent,
            ", ".join(changed),
        )


def _step_of(checkpoint: Path) -> int:
    step = checkpoint.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


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
    end_with_parent(signal.SIGKILL)  # nothing trains on when torchrun was killed
    return run_command(lambda: train(load_config(config_path)), *TRAINING_ERRORS)


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
