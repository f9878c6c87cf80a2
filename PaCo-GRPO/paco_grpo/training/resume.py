"""What a run finds in its folder: refused, resumed or begun, before weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paco_grpo.checkpoint import files
from paco_grpo.checkpoint.state import read_numbers, verify
from paco_grpo.hashing import hash_middles, hash_samples, hash_value
from paco_grpo.monitoring.trackers import MetricsFile
from paco_grpo.options import OPTIONS, ConfigError, RunOptions, load_options
from paco_grpo.training.plan import evaluation_images, picture_bytes
from paco_grpo.types import Item
from paco_judge.json_io import parse_object

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
)
# Options that may differ without a message; the text length may be derived.
_UNIMPORTANT = ("resume_from", "resume_changed", "run_name", "max_sequence_length")
# What is hashed → the option that names it.
_HASHES = {
    "prompts": "dataset",
    "items": "dataset",
    "references": "dataset",
    "weights": "pretrained.model",
}


@dataclass(frozen=True)
class Earlier:
    """What a run continues."""

    hashes: Mapping[str, str]  # of the prompt set and the model's weights now, for plan.json
    checkpoint: Path | None = None  # None: the run starts from its beginning
    epoch: int = 0  # of the checkpoint


def find_earlier(options: RunOptions, folder: Path, items: Mapping[str, Sequence[Item]]) -> Earlier:
    """Refuse a folder that holds a run, unless it resumes with what its checkpoints belong to.

    Every option that differs from the saved configuration is logged. Other values of ``_BOUND``,
    other training prompts and other weights in the model's folder are refused unless
    ``config.resume_changed`` is set.

    Raises:
        ConfigError: For all of this, and for a damaged file that a resume needs.
        CheckpointError: The checkpoint is damaged.
    """
    hashes = _hashes(options, items)
    metrics = MetricsFile(folder / "metrics.jsonl")
    if not options.resume_from:
        if metrics.exists():
            raise ConfigError(
                f"{folder} already holds a run: give --config.resume_from=latest or another "
                "run_name"
            )
        return Earlier(hashes)
    rows = metrics.rows()  # refuses a damaged file
    checkpoint = files.find_checkpoint(options.resume_from, folder)
    if checkpoint is None:
        _refuse_lost_checkpoints(options, folder, rows)
        if rows:
            _compare(options, folder, hashes)
        return Earlier(hashes)
    verify(checkpoint)
    epoch = read_numbers(checkpoint)["epoch"]
    _compare(options, checkpoint.parents[1], hashes)
    if checkpoint.parents[1] == folder:
        _warn_of_missing_rows(metrics.path, rows, epoch)
    return Earlier(hashes, checkpoint, epoch)


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


def space_for_checkpoints(options: RunOptions, folder: Path, num_weights: int, epoch: int) -> int:
    """Bytes that the run's further checkpoints will need."""
    # weights, average, two Adam moments and two saved adapters
    size = 6 * 4 * num_weights
    epochs_left = max(0, options.num_epochs - epoch)
    to_write = 1 + (epochs_left // options.save_freq if options.save_freq else 0)
    if epochs_left == 0 and epoch > 0:
        to_write = 0
    existing = len(files.list_checkpoints(folder / "checkpoints"))
    # The next one is whole before the oldest is removed.
    kept = max(0, options.num_checkpoint_limit - existing) + 1
    return size * min(to_write, kept)


def space_for_pictures(options: RunOptions, folder: Path, num_items: int, epoch: int) -> int:
    """Bytes of the pictures of one evaluation, except those that a finished run already has."""
    needed = picture_bytes(options, num_items)
    if epoch < options.num_epochs:
        return needed
    pictures = len(list((folder / "eval" / files.checkpoint_name(epoch)).glob("[0-9]*.png")))
    missing = max(0, evaluation_images(options, num_items) - pictures)
    return needed * missing // evaluation_images(options, num_items)


def _refuse_lost_checkpoints(
    options: RunOptions, folder: Path, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise a ``ConfigError`` if the checkpoints of trained epochs are gone; warn if none was due.

    A run makes the folder of its checkpoints when it starts.
    """
    epochs = max([row["epoch"] for row in rows if row["phase"] == "train"], default=0)
    checkpoints = folder / "checkpoints"
    was_due = epochs > options.save_freq > 0
    if epochs and (was_due or not checkpoints.is_dir()):
        raise ConfigError(
            f"{folder / 'metrics.jsonl'} has {epochs} epochs, but {checkpoints} holds no "
            "checkpoint: put it back to resume. To start from the beginning, choose another "
            "--config.run_name or remove metrics.jsonl"
        )
    if checkpoints.exists() and not checkpoints.is_dir():
        raise ConfigError(f"{checkpoints} is not a folder; remove it")
    logger.warning("%s has no checkpoint, starting from the beginning", folder)


def _warn_of_missing_rows(path: Path, rows: Sequence[Mapping[str, Any]], epoch: int) -> None:
    trained = {row["epoch"] for row in rows if row["phase"] == "train"}
    missing = [number for number in range(1, epoch + 1) if number not in trained]
    if missing:
        logger.warning(
            "%s lacks %d of the %d epochs before the checkpoint, from epoch %d on: signs of "
            "collapse are compared with the remaining epochs",
            path,
            len(missing),
            epoch,
            missing[0],
        )


def _compare(options: RunOptions, earlier: Path, hashes: Mapping[str, str]) -> None:
    """Log the options that differ from the run in ``earlier``, and refuse some."""
    changed = _changed_options(options, earlier / "config.yaml")
    bound = [text for name, text in changed.items() if name in _BOUND]
    plan = _saved_plan(earlier / "plan.json")
    for what, option in _HASHES.items():
        if plan.get(what, hashes[what]) != hashes[what]:
            bound.append(f"config.{option} ({attrgetter(option)(options)} holds other {what})")
    if bound and not options.resume_changed:
        raise ConfigError(
            f"{earlier} was trained with another {', '.join(bound)}; or set "
            "--config.resume_changed=True"
        )
    has_other_tests = False
    for what in ("test_items", "test_references"):
        has_other_tests |= plan.get(what, hashes[what]) != hashes[what]
    if has_other_tests:
        logger.warning(
            "%s holds other test items than before: evaluations cannot be compared with earlier "
            "ones",
            options.dataset,
        )


def _changed_options(options: RunOptions, path: Path) -> dict[str, str]:
    """Name → text of each option that differs from the config.yaml ``path``; all are logged."""
    if not path.exists():
        logger.warning("%s is missing: the options are not compared with the earlier ones", path)
        return {"config.yaml": "missing"}
    before = _saved_options(path)
    changed = {}
    for name in OPTIONS:
        saved = attrgetter(name)(before)
        now = attrgetter(name)(options)
        if saved == now:
            continue
        changed[name] = f"config.{name} ({saved!r} -> {now!r})"
        if name not in _UNIMPORTANT:
            logger.warning("resuming with another config.%s: %r -> %r", name, saved, now)
    return changed


def _saved_options(path: Path) -> RunOptions:
    """The options in a run's config.yaml. One that was cut off would be read as defaults."""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        last_option = max(OPTIONS)
        last_group = last_option.partition(".")[0]
        if not isinstance(values, dict) or last_group not in values or not text.endswith("\n"):
            raise ValueError("it is not whole")
        return load_options(str(path))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise damaged(
            path, error, "the options are then not compared with the earlier ones"
        ) from error


def _saved_plan(path: Path) -> dict[str, Any]:
    """The plan.json of a run, empty if there is none."""
    if not path.exists():
        return {}
    try:
        return parse_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(
            path, error, "prompts and weights are then not compared with the earlier ones"
        ) from error


def damaged(path: Path, error: Exception, consequence: str) -> ConfigError:
    """The error for a file of a run's folder that cannot be read and may be deleted."""
    reason = " ".join(str(error).split())[:200]
    return ConfigError(
        f"{path} is damaged ({reason}). Put back a good copy, or delete it: {consequence}"
    )


def _hashes(options: RunOptions, items: Mapping[str, Sequence[Item]]) -> dict[str, str]:
    """Of a hub name there are no files of weights here: it is compared by name."""
    transformer = Path(options.pretrained.model).expanduser() / "transformer"
    references = {}
    for split in ("train", "test"):
        references[split] = hash_middles(_reference_files(items[split], options.dataset, split))
    hashes = {
        "prompts": hash_value([item.prompt for item in items["train"]]),
        "items": hash_value([_content(item, options.dataset) for item in items["train"]]),
        "test_items": hash_value([_content(item, options.dataset) for item in items["test"]]),
        "references": references["train"],
        "test_references": references["test"],
        "weights": hash_samples(sorted(transformer.glob("*.safetensors"))),
    }
    return {name: digest[:16] for name, digest in hashes.items()}


def _content(item: Item, dataset: str) -> list[Any]:
    """What training takes from an item; of reference images in files, their names and sizes."""
    sizes = []
    for path in _image_files(item, dataset):
        sizes.append(path.stat().st_size if path.is_file() else None)
    metadata = dict(item.metadata)
    return [item.prompt, item.height, item.width, item.num_references, metadata, sizes]


def _image_files(item: Item, dataset: str) -> list[Path]:
    """Where the reference images of an item are, if each is a file."""
    names = item.metadata.get("images", [item.metadata.get("image")])
    if not item.num_references or not isinstance(names, list):
        return []
    return [Path(dataset) / str(name) for name in names]


def _reference_files(items: Sequence[Item], dataset: str, split: str) -> list[Path]:
    """The files that hold reference images: one each, or a table of all of them."""
    files = [Path(dataset) / f"{split}.arrow", Path(dataset) / f"{split}.parquet"]
    for item in items:
        files += _image_files(item, dataset)
    return [file for file in files if file.is_file()]
