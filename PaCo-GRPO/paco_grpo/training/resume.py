"""How a run begins again."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from paco_grpo.data.sets import PromptSet, fingerprint_sets
from paco_grpo.objectives import Objective
from paco_grpo.options import OPTIONS, ConfigError, RunOptions, load_options, public_options
from paco_grpo.policies.adapters import find_lora, objective_adapter
from paco_grpo.rewards.contract import Reward
from paco_grpo.training import checkpoints
from paco_grpo.training.run import Run
from paco_grpo.training.stopping import TrainingStopped  # noqa: F401 - its place before 0.7
from paco_judge.identity import UNRECORDED, Match, identity, match

logger = logging.getLogger(__name__)

# With other values of these, the weights of a checkpoint mean something else.
_BOUND = (
    "seed",
    "pretrained.model",
    "pretrained.policy",
    "sample.transition",
    "sample.window_epochs",
    "sample.window_stride",
    "use_lora",
    "train.loss_type",
    "train.loss_kwargs",
    "train.opd_teachers",
    "train.lora_rank",
    "train.lora_alpha",
    "train.lora_targets",
    "train.lora_path",
    "train.reference",
    "train.use_8bit_adam",
)
# Options that may differ without a message; the text lengths follow from the prompts.
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

    checkpoint: Path | None = None  # None: the run starts from its beginning
    # Option or reward → identity (``paco_judge.identity``) in the run of the checkpoint.
    identities: Mapping[str, str | None] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)  # in that run's plan.json


def find_earlier(options: RunOptions, prompt_sets: Sequence[PromptSet], folder: Path) -> Earlier:
    """Refuse a folder that holds a run, unless it resumes with what its checkpoints belong to.

    Every option that differs from the saved configuration is logged. Other values of ``_BOUND``,
    another prompt set and another model in the same folders are refused unless
    ``config.resume_changed`` is set.

    Raises:
        ConfigError: The folder holds a run that these options may not continue.
        CheckpointError: The checkpoint is of another version.
    """
    checkpoint = None
    own = checkpoints.list_checkpoints(folder / "checkpoints")
    holds_a_run = bool(own) or (folder / "metrics.jsonl").exists() or (folder / "eval").exists()
    is_another = holds_a_run
    if options.resume_from:
        checkpoint = checkpoints.find_checkpoint(options.resume_from, folder)
        is_another = holds_a_run and checkpoint is not None and not _is_in(checkpoint, folder)
    if is_another:
        raise ConfigError(
            f"{folder} already holds a run: give --config.resume_from=latest or another run_name"
        )
    if not options.resume_from:
        return Earlier()
    if checkpoint is None:
        # A first start may be told to resume, too: that is nothing to warn of.
        level = logging.WARNING if holds_a_run else logging.INFO
        logger.log(level, "%s has no checkpoint, starting from the beginning", folder)
        return Earlier()
    checkpoints.read_numbers(checkpoint)
    plan = json.loads((checkpoint.parents[1] / "plan.json").read_bytes())
    # An earlier version wrote others, under another name.
    earlier = Earlier(checkpoint, plan.get("identities", {}), plan.get("proof", {}))
    _compare(options, prompt_sets, checkpoint, earlier)
    return earlier


def _is_in(checkpoint: Path, folder: Path) -> bool:
    own = folder / "checkpoints"
    return own.is_dir() and checkpoint.parent.samefile(own)


def identities(options: RunOptions, prompt_sets: Sequence[PromptSet]) -> dict[str, str | None]:
    """The identities of what ``options`` name, by option; ``prompt_sets`` are theirs."""
    of_options = {
        "dataset": fingerprint_sets(prompt_sets),
        "pretrained.model": identity(options.pretrained.model),
    }
    if options.train.lora_path:
        of_options["train.lora_path"] = identity(find_lora(options.train.lora_path))
    return of_options


def reward_identities(rewards: Mapping[str, Reward]) -> dict[str, str | None]:
    """The identities of what scores, by the rewards' names."""
    return {f"the weights of {name}": reward.weights() for name, reward in rewards.items()}


def adapter_identities(objective: Objective) -> dict[str, str | None]:
    """The identities of the objective's own LoRAs."""
    identities = {}
    for name, place in objective.adapters.items():
        identities[f"the adapter {name}"] = identity(find_lora(place, objective_adapter(name)))
    return identities


def compare_weights(options: RunOptions, earlier: Earlier, now: Mapping[str, str | None]) -> None:
    """Refuse other weights of a judge, reward or teacher than those of the run that is continued.

    Raises ConfigError.
    """
    if earlier.checkpoint is None:
        return
    known = {name: now[name] for name in now if name in earlier.identities}
    _refuse_others(options, earlier.checkpoint, _others(earlier, known))


def load_state(run: Run) -> None:
    """Load the checkpoint that ``run`` resumes from, and set aside what came after it."""
    if not run.options.resume_from:
        return
    checkpoint = run.resumes_from
    if checkpoint is not None:
        run.checkpoints.load(checkpoint)
        logger.info("resumed from %s", checkpoint)
    if run.accelerator.is_main_process:
        if checkpoint is None:
            checkpoints.archive_superseded(run.folder / "eval", -1)
            run.metrics.set_aside()
        else:
            epoch = run.state.epoch
            checkpoints.archive_superseded(run.checkpoints.root, epoch)
            checkpoints.archive_superseded(run.folder / "eval", epoch)
            run.metrics.keep_until(epoch)
    run.accelerator.wait_for_everyone()


def _compare(
    options: RunOptions, prompt_sets: Sequence[PromptSet], checkpoint: Path, earlier: Earlier
) -> None:
    """Log the options that differ from the earlier run, and refuse some."""
    before = public_options(load_options(str(checkpoint.parents[1] / "config.yaml")))
    options = public_options(options)
    bound = []
    for name in OPTIONS:
        saved = attrgetter(name)(before)
        now = attrgetter(name)(options)
        if saved != now and name not in _UNIMPORTANT:
            logger.warning("resuming with another config.%s: %r -> %r", name, saved, now)
            if name in _BOUND:
                bound.append(f"config.{name} ({saved!r} -> {now!r})")
    for name in _others(earlier, identities(options, prompt_sets)):
        place = attrgetter(name)(options) or "config.datasets"
        bound.append(f"config.{name} ({place} holds other files)")
    _refuse_others(options, checkpoint, bound)


def _others(earlier: Earlier, now: Mapping[str, str | None]) -> list[str]:
    """The names of what is known to be another; a line says of what this is unknown."""
    others = []
    unknown = []
    for name, of_today in now.items():
        of_name = match(earlier.identities.get(name, UNRECORDED), of_today)
        if of_name is Match.DIFFERENT:
            others.append(name)
        elif of_name is not Match.SAME:
            unknown.append(f"{name} ({of_name.value})")
    if unknown:
        logger.warning(
            "resuming without knowing whether these are as before: %s", ", ".join(unknown)
        )
    return others


def _refuse_others(options: RunOptions, checkpoint: Path, others: Sequence[str]) -> None:
    if others and not options.resume_changed:
        raise ConfigError(
            f"{checkpoint.parents[1]} was trained with other values of {', '.join(others)}: "
            "use those again, or set --config.resume_changed=True"
        )
