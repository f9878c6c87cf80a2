"""What a run finds in its folder: refused, resumed or begun, before weights are loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.state import read_numbers
from paco_grpo.data.sets import fingerprint_sets
from paco_grpo.options import OPTIONS, ConfigError, RunOptions, load_options
from paco_judge.files import fingerprint

if TYPE_CHECKING:
    from paco_grpo.training.build import Run

logger = logging.getLogger(__name__)

# A checkpoint continues what these made; with other values its weights mean something else.
_BOUND = (
    "seed",
    "pretrained.model",
    "use_lora",
    "train.loss_type",
    "train.loss_kwargs",
    "train.lora_rank",
    "train.lora_alpha",
    "train.lora_targets",
    "train.lora_path",
    "train.reference",
    "train.use_8bit_adam",
)
# Options that may differ without a message; the text length may be derived.
_UNIMPORTANT = (
    "resume_from",
    "resume_changed",
    "run_name",
    "max_sequence_length",
    "train.max_sequence_length",
)


@dataclass(frozen=True)
class Earlier:
    """What a run continues."""

    # Option → fingerprint of the folder that it names, for plan.json; None: nothing is here.
    fingerprints: Mapping[str, str | None]
    checkpoint: Path | None = None  # None: the run starts from its beginning


def find_earlier(options: RunOptions, folder: Path) -> Earlier:
    """Refuse a folder that holds a run, unless it resumes with what its checkpoints belong to.

    Every option that differs from the saved configuration is logged. Other values of ``_BOUND``,
    another prompt set and another model in the same folders are refused unless
    ``config.resume_changed`` is set.

    Raises:
        ConfigError: For all of this.
        CheckpointError: The checkpoint is of another version.
    """
    fingerprints = {
        "dataset": fingerprint_sets(options),
        "pretrained.model": fingerprint(options.pretrained.model),
    }
    if not options.resume_from:
        if (folder / "metrics.jsonl").exists():
            raise ConfigError(
                f"{folder} already holds a run: give --config.resume_from=latest or another "
                "run_name"
            )
        return Earlier(fingerprints)
    checkpoint = files.find_checkpoint(options.resume_from, folder)
    if checkpoint is None:
        logger.warning("%s has no checkpoint, starting from the beginning", folder)
    else:
        read_numbers(checkpoint)
        _compare(options, checkpoint.parents[1], fingerprints)
    return Earlier(fingerprints, checkpoint)


def load_state(run: Run) -> None:
    """Load the checkpoint that ``run`` resumes from, and set aside what came after it."""
    if not run.options.resume_from:
        return
    checkpoint = run.earlier.checkpoint
    if checkpoint is not None:
        run.checkpoints.load(checkpoint)
        logger.info("resumed from %s", checkpoint)
    if run.accelerator.is_main_process:
        if checkpoint is None:
            files.archive_superseded(run.folder / "eval", -1)
            run.metrics.set_aside()
        else:
            epoch = run.state.epoch
            files.archive_superseded(run.checkpoints.root, epoch)
            files.archive_superseded(run.folder / "eval", epoch)
            run.metrics.keep_until(epoch)
    run.accelerator.wait_for_everyone()


def _compare(options: RunOptions, earlier: Path, fingerprints: Mapping[str, str | None]) -> None:
    """Log the options that differ from the run in ``earlier``, and refuse some."""
    before = load_options(str(earlier / "config.yaml"))
    bound = []
    for name in OPTIONS:
        saved = attrgetter(name)(before)
        now = attrgetter(name)(options)
        if saved != now and name not in _UNIMPORTANT:
            logger.warning("resuming with another config.%s: %r -> %r", name, saved, now)
            if name in _BOUND:
                bound.append(f"config.{name} ({saved!r} -> {now!r})")
    saved_fingerprints = json.loads((earlier / "plan.json").read_bytes())["fingerprints"]
    for name, now in fingerprints.items():
        saved = saved_fingerprints[name]
        if None not in (saved, now) and saved != now:
            place = attrgetter(name)(options) or "config.datasets"
            bound.append(f"config.{name} ({place} holds other files)")
    if bound and not options.resume_changed:
        raise ConfigError(
            f"{earlier} was trained with another {', '.join(bound)}; or set "
            "--config.resume_changed=True"
        )
