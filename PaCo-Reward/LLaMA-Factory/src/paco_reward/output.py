"""The output folder of a training or an export: its lock, room on the disk, resuming."""

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from paco_reward.errors import PacoRewardError

logger = logging.getLogger(__name__)

CONFIG_FILE = "train.yaml"  # the options that a training was started with
STATE_FILE = "trainer_state.json"  # the last file that transformers writes into a checkpoint
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of safetensors and of torch.save on a full disk; they are no OSErrors.
_FULL_TEXTS = ("os error 27)", "os error 28)", "os error 122)", "PytorchStreamWriter failed")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of ``folder`` until the block or this process ends.

    Raises:
        PacoRewardError: Another process has it; the message names the process.
        OSError: It cannot be written to.
    """
    # Without O_TRUNC: who comes second reads who has the lock.
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PacoRewardError(
                f"{folder} is in use by {file.read(200).strip()}; end it, or name another folder"
            ) from None
        except OSError as error:  # a network file system without locks
            logger.warning("%s cannot be locked (%s): use it once at a time", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        # Helper processes that outlive a kill must not keep the folder.
        os.register_at_fork(after_in_child=file.close)
        yield


def check_writable(file: Path) -> None:
    """Make the folder of a file that is written at the end, and see that it can be written.

    Raises:
        OSError: It cannot.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    existed = file.exists()
    file.open("a").close()
    if not existed:
        file.unlink()


def check_free(folder: Path, num_bytes: int) -> None:
    """Raise PacoRewardError if the file system of ``folder`` has less room than ``num_bytes``."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise PacoRewardError(
            f"{folder} has {free / 2**20:.0f} MiB free, but about {num_bytes / 2**20:.0f} MiB will "
            "be written; free some, or name a folder on another disk"
        )


def check_space(folder: Path, model: Any, args: Any) -> None:
    """Refuse a training whose trained weights and checkpoints do not fit on the disk.

    Args:
        folder: The output folder; checkpoints that it has are replaced, so they count as room.
        model: The model, for its trained parameters.
        args: ``TrainingArguments``.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    num_checkpoints = 0
    if args.save_strategy != "no":
        # An old checkpoint is removed after a new one is written.
        num_checkpoints = 1 + (args.save_total_limit or 0)
    num_existing = len(list(folder.glob("checkpoint-*")))
    num_new = max(num_checkpoints - num_existing, 0)
    # AdamW keeps two moments of each weight.
    checkpoint = weights if args.save_only_model else 3 * weights
    check_free(folder, weights + num_new * checkpoint)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of writing a file says that there is no room for it."""
    if getattr(error, "errno", None) in _FULL:
        return True
    return any(text in str(error) for text in _FULL_TEXTS)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """Write the options of a training; returns the file, which can be trained with."""
    file = folder / CONFIG_FILE
    partial = file.with_name(f".{CONFIG_FILE}")
    partial.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "utf-8")
    partial.replace(file)
    return file


def with_resume(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the checkpoint that a repeated command continues; says which and why.

    LLaMA-Factory alone silently takes the newest folder, even one that a kill cut off.

    Raises:
        PacoRewardError: The folder has a finished training without checkpoints.
    """
    folder = Path(config["output_dir"])
    chosen = config.get("resume_from_checkpoint")
    if chosen or config.get("overwrite_output_dir") or not config.get("do_train"):
        return config
    checkpoints = sorted(folder.glob("checkpoint-*"), key=_step_of)
    whole = [checkpoint for checkpoint in checkpoints if _state_of(checkpoint)]
    for checkpoint in checkpoints:
        if checkpoint not in whole:
            logger.warning("%s is incomplete and is not used", checkpoint)
    if not checkpoints:
        if any((folder / name).is_file() for name in WEIGHTS):
            raise PacoRewardError(
                f"{folder} has trained weights and no checkpoints; set another output_dir, or "
                "overwrite_output_dir=true"
            )
        return config
    if not whole:
        return config | {"overwrite_output_dir": True}
    state = _state_of(whole[-1])
    logger.info(
        "resuming from %s, step %s of %s", whole[-1], state["global_step"], state["max_steps"]
    )
    has_optimizer = any(whole[-1].glob("optimizer.*")) or any(whole[-1].glob("global_step*"))
    if not has_optimizer:
        logger.warning("it has no optimizer state (save_only_model): the moments start at zero")
    for change in changes(folder, config):
        logger.warning("differs from the training that is resumed: %s", change)
    return config | {"resume_from_checkpoint": str(whole[-1])}


def changes(folder: Path, config: dict[str, Any]) -> list[str]:
    """What a configuration changes of the one that ``folder`` was trained with, one by one."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return []
    try:
        before = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise PacoRewardError(f"{file} cannot be read ({error}); delete it") from error
    if not isinstance(before, dict):
        raise PacoRewardError(f"{file} holds no options; delete it")
    differences = []
    for key in {**before, **config}:
        if key != "resume_from_checkpoint" and config.get(key) != before.get(key):
            differences.append(f"{key} {config.get(key)!r}, before {before.get(key)!r}")
    return differences


def _step_of(checkpoint: Path) -> int:
    step = checkpoint.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


def _state_of(checkpoint: Path) -> dict[str, Any] | None:
    """The trainer's state in a checkpoint; None if it was not written to its end."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and "global_step" in state else None
