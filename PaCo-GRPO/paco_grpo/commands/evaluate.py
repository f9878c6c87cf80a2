"""The work of ``evaluate``: images and scores of one or two adapters, their tables."""

import argparse
import dataclasses
import gc
import json
import logging
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from paco_grpo.data.sets import fingerprint_sets, load_items, prompt_sets, reward_arguments
from paco_grpo.distributed import Strategy, main_decides, start_processes
from paco_grpo.evaluation.evaluate import Evaluation, log_repeats
from paco_grpo.evaluation.intervals import Row, intervals, markdown
from paco_grpo.monitoring.metrics import pairs_of
from paco_grpo.names import did_you_mean
from paco_grpo.options import OPTIONS, ConfigError, RunOptions
from paco_grpo.policies.adapters import add_lora, find_lora
from paco_grpo.policies.loading import apply_speed, load_generator, text_length
from paco_grpo.rewards.contract import Reward
from paco_grpo.rewards.registry import short_name, write_records
from paco_grpo.rewards.sets import begun, rewards_of
from paco_grpo.training import checks
from paco_grpo.training.references import check_headers, stored_images
from paco_grpo.training.resolve import resolve_for_images
from paco_grpo.training.state import merges_lora
from paco_grpo.types import Item
from paco_judge.files import (
    read_json,
    read_json_lines,
    write_atomically,
    write_json,
)
from paco_judge.identity import UNRECORDED, Match, identity, match

BASE = "base"
# Name → prompt set as dataset/fetch.py writes it, its kind, the rewards that measure its images.
BENCHMARKS = {
    "t2is": ("dataset/public-t2is", "geneval", ("consistency_score", "subfig_clipT", "pickscore")),
    "gedit": ("dataset/public-gedit", "geneval_image", ("consistency_for_editing",)),
}
LEAST_IMAGES = 4  # of a prompt, for w and b
# Options that change the images, besides all of ``pretrained`` and ``test``.
_OF_IMAGES = (
    "allow_tf32", "item_size", "max_sequence_length", "mixed_precision", "prompt_fn",
    "sample.guidance_scale", "sample.negative_prompt", "seed", "speed.attention", "speed.compile",
)  # fmt: skip
# Of those two groups: what counts by content, and what changes no image.
_NOT_BY_NAME = (
    "pretrained.model", "test.reward_fn", "test.reward_fn_kwargs", "test.batch_size",
    "test.save_eval_images",
)  # fmt: skip
RECORD = "evaluation.json"
_FORMAT = 2  # of it
logger = logging.getLogger("evaluate")


class EvaluationSet(NamedTuple):
    """Prompts with the options and rewards of their evaluation."""

    options: RunOptions
    items: list[Item]
    rewards: dict[str, Reward]


def compare_adapters(options: RunOptions, command: argparse.Namespace) -> str:
    """Evaluate the adapter and its opponent, on all benchmarks; returns the tables.

    Without benchmarks, on the configuration's test set. All sets, rewards and adapters are checked
    before anything is sampled.
    """
    options = resolve_for_images(options)
    options_of = {}  # by folder
    for benchmark in command.benchmarks.split(","):
        if benchmark:
            folder = command.output / benchmark.partition("=")[0]
            options_of[folder] = options_for(options, benchmark)
    has_benchmarks = bool(options_of)
    if not has_benchmarks:
        options_of[command.output] = options
    images_per_prompt = command.images_per_prompt
    for folder, set_options in options_of.items():
        if images_per_prompt != 1:
            options_of[folder] = measuring(set_options, images_per_prompt)
        checks.check_run(options_of[folder])
    adapters = {"": _adapter(command.adapter, "--adapter")}  # by folder below the set's
    if command.against:
        adapters["against"] = _adapter(command.against, "--against")

    strategy = start_processes(options)
    accelerator = strategy.accelerator
    prepared: dict[Path, EvaluationSet] = {}
    for folder, set_options in options_of.items():
        prepared[folder] = prepare(set_options, accelerator, folder, images_per_prompt)
    for folder, evaluation_set in prepared.items():
        adapter_of = {folder / name: adapter for name, adapter in adapters.items()}
        with begun(evaluation_set.rewards.values(), folder, accelerator):
            sample_adapters(evaluation_set, strategy, adapter_of, command.continue_unknown)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return ""
    tables = []
    for folder in prepared:
        tables_of_set = results(folder, command.adapter, command.against)
        tables.append(f"## {folder.name}\n\n{tables_of_set}" if has_benchmarks else tables_of_set)
    return "\n".join(tables)


def options_for(options: RunOptions, benchmark: str) -> RunOptions:
    """``options`` with the test set and rewards of ``benchmark``, a name or ``name=folder``."""
    name, _, folder = benchmark.partition("=")
    if name not in BENCHMARKS:
        raise ConfigError(
            f"unknown benchmark {name!r}.{did_you_mean(name, BENCHMARKS)} "
            f"Known: {', '.join(BENCHMARKS)}"
        )
    public, kind, rewards = BENCHMARKS[name]
    test = dataclasses.replace(
        options.test,
        reward_fn=dict.fromkeys(rewards, 1.0),
        num_images=None,
        save_eval_images=True,
    )
    kwargs = dict(options.train.reward_fn_kwargs)
    for reward in rewards:
        if arguments := reward_arguments(options, reward):
            kwargs[reward] = arguments
    # Prompt sets may all have had their own rewards, but a run needs some.
    trained = options.train.reward_fn or test.reward_fn
    train = dataclasses.replace(options.train, reward_fn=trained, reward_fn_kwargs=kwargs)
    groups = {"train": train, "test": test, "datasets": {}}
    return dataclasses.replace(options, dataset=folder or public, prompt_fn=kind, **groups)


def _adapter(place: str | None, option: str) -> Path | None:
    """The adapter's folder; None for the base model."""
    return find_lora(place, option) if place and place != BASE else None


def prepare(
    options: RunOptions, accelerator: Accelerator, folder: Path, images_per_prompt: int
) -> EvaluationSet:
    """Read and check the prompts, and build rewards that have answered."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = prompt_sets(options)
    items = load_items(sets, "test")
    checks.check_items(options, {"test": items})
    main_decides(accelerator, lambda: check_headers(stored_images(items)))
    if images_per_prompt > 1:
        test = dataclasses.replace(options.test, num_images=images_per_prompt * len(items))
        options = dataclasses.replace(options, test=test)
        if not any(item.metadata.get("open") for item in items):
            logger.warning(
                "no prompt is open, so there is no w − b; python dataset/fetch.py t2is --open_twins "
                "makes some"
            )
    text_length(options, items)  # warns of prompts that will be truncated
    rewards = rewards_of(sets, accelerator.device, {"test": items})["test"]
    if accelerator.is_main_process and images_per_prompt == 1:
        log_repeats(items, sets, options, rewards)
    return EvaluationSet(options, items, rewards)


def sample_adapters(
    evaluation_set: EvaluationSet,
    strategy: Strategy,
    adapters: Mapping[Path, Path | None],
    continue_unknown: bool,
) -> None:
    """Write images and scores of each adapter (None: the base model) to its folder.

    ``continue_unknown``: see ``is_complete``.
    """
    options, items, rewards = evaluation_set
    for folder, adapter in adapters.items():
        decide = partial(is_complete, folder, options, rewards, adapter, continue_unknown)
        if main_decides(strategy.accelerator, decide):
            continue
        logger.info("evaluating %s", adapter or f"the base model {options.pretrained.model}")
        policy = load_generator(options, strategy.loading_device)
        if adapter is not None:
            option = "--against" if folder.name == "against" else "--adapter"
            add_lora(policy, lora_path=adapter, option=option)
        if strategy.accelerator.is_main_process:
            record_evaluation(folder, options, rewards, adapter)
        strategy.place(policy)
        apply_speed(options, policy)
        merge_lora = adapter is not None and merges_lora(options, policy.device)
        evaluation = Evaluation(
            policy, items, rewards, options, strategy, prompt_sets(options), merge_lora
        )
        metrics = evaluation.run(folder, keep_images=True)
        if strategy.accelerator.is_main_process:
            write_json(folder / "metrics.json", metrics)
        # The memory is needed for the next one.
        del policy, evaluation
        gc.collect()


def is_complete(
    folder: Path,
    options: RunOptions,
    rewards: Mapping[str, Reward],
    adapter: Path | None,
    continue_unknown: bool = False,
) -> bool:
    """Whether ``folder`` holds all images and scores of this evaluation.

    ``evaluation.json`` records what they depend on, so that only the same evaluation continues
    there. Other rewards score the same images.

    Args:
        folder: Of the evaluation.
        options, rewards, adapter: Of today.
        continue_unknown: Also take images and scores of which it is unknown whether they are of the
            same weights.

    Raises:
        ConfigError: The folder holds images of another evaluation, or it is unknown of which.
    """
    now = _identity(options, rewards, adapter)
    record = folder / RECORD
    metrics = folder / "metrics.json"
    if record.exists() or any(folder.glob("[0-9]*.png")):
        before = read_json(record) if record.exists() else {}
        changed, unknown = _differences(before, now)
        if changed:
            raise ConfigError(
                f"{folder} holds images with another {', '.join(changed)}: choose another --output"
            )
        other_scores, unknown_scores = _differences_of_rewards(before.get("rewards", {}), now)
        is_scored = False
        if metrics.is_file() and not other_scores:
            is_scored = read_json(metrics)["eval/missing_share"] == 0
        if is_scored:
            unknown += unknown_scores
        if unknown and not continue_unknown:
            raise ConfigError(
                f"whether {folder} holds results of the same {', '.join(unknown)} is unknown: "
                "choose another --output, or pass --continue_unknown to take them"
            )
        if is_scored:
            return True
    metrics.unlink(missing_ok=True)
    return False


def record_evaluation(
    folder: Path, options: RunOptions, rewards: Mapping[str, Reward], adapter: Path | None
) -> None:
    """Write ``evaluation.json`` and ``questions.json``.

    Once the model has been loaded and is in the cache for sure.
    """
    write_json(folder / RECORD, _identity(options, rewards, adapter))
    write_records(rewards, folder)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of what has changed, and of what may have changed; without rewards."""
    changed = []
    unknown = []
    of_this_version = before.get("format") == _FORMAT
    for name in now.keys() - {"format", "rewards"}:
        if name.startswith("config."):
            if before.get(name) != now[name]:
                changed.append(name)
            continue
        recorded = before.get(name) if of_this_version else UNRECORDED
        of_name = match(recorded, now[name])
        if of_name is Match.DIFFERENT or not before:
            changed.append(name)
        elif of_name is not Match.SAME:
            unknown.append(f"{name} ({of_name.value})")
    return sorted(changed), sorted(unknown)


def _differences_of_rewards(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Names of the rewards that have changed, and of those that may have changed."""
    changed = [name for name in before if name not in now["rewards"]]
    unknown = []
    for name, reward in now["rewards"].items():
        earlier = before.get(name)
        if earlier is None:
            changed.append(name)
            continue
        if isinstance(earlier, list):  # an earlier version's
            earlier = reward | {"weights": UNRECORDED}
        of_reward = match(earlier["weights"], reward["weights"])
        if of_reward is Match.DIFFERENT or earlier | {"weights": reward["weights"]} != reward:
            changed.append(name)
        elif of_reward is not Match.SAME:
            unknown.append(f"{name} ({of_reward.value})")
    return changed, unknown


def _identity(
    options: RunOptions, rewards: Mapping[str, Reward], adapter: Path | None
) -> dict[str, Any]:
    """Everything that changes images or scores; ``rewards`` alone changes only scores."""
    of_all: dict[str, Any] = {
        "format": _FORMAT,
        "model": identity(options.pretrained.model),
        "data set": fingerprint_sets(prompt_sets(options)),
        "adapter": identity(adapter) if adapter else BASE,
    }
    for name in OPTIONS:
        of_images = name in _OF_IMAGES or name.startswith(("pretrained.", "test."))
        if of_images and name not in _NOT_BY_NAME:
            of_all[f"config.{name}"] = attrgetter(name)(options)
    of_all["rewards"] = {}
    for name, reward in rewards.items():
        of_all["rewards"][name] = reward.identity()
    return json.loads(json.dumps(of_all, default=str))


def results(folder: Path, adapter: str | None, against: str | None) -> str:
    """The table of one test set, also as ``results.md`` and ``results.json`` in ``folder``."""
    by_set = _by_dataset(folder)
    others_by_set = _by_dataset(folder / "against") if against is not None else {}
    record: dict[str, Any] = {"adapter": adapter or BASE, "against": against}
    tables = f"adapter: {adapter or BASE}"
    if against is not None:
        tables += f"; against: {against}"
    tables += "\n"
    for name, rows_of_set in by_set.items():
        columns = {"adapter": intervals(rows_of_set)}
        if against is not None:
            others = others_by_set[name]
            columns["against"] = intervals(others)
            columns["difference"] = intervals(rows_of_set, others)
        missing = {}
        for reward in rows_of_set[0]["rewards"]:
            missing[reward] = sum(row["rewards"][reward] is None for row in rows_of_set)
        measured = {"missing": missing, "results": columns}
        if name:
            record.setdefault("datasets", {})[name] = measured
            tables += f"\n{name}:\n"
        else:
            record |= measured
        tables += f"\n{markdown(columns)}"
    text = json.dumps(record, indent=1, default=dataclasses.asdict)
    write_atomically(folder / "results.json", text)
    write_atomically(folder / "results.md", tables)
    return tables


def _by_dataset(folder: Path) -> dict[str, list[Row]]:
    """The rows of an evaluation by the name of their prompt set, "" in a run with one."""
    rows_of: dict[str, list[Row]] = {}
    for row in read_json_lines(folder / "eval_data.jsonl"):
        rows_of.setdefault(row.get("dataset", ""), []).append(row)
    return rows_of


def measuring(options: RunOptions, images_per_prompt: int) -> RunOptions:
    """``options`` whose test rewards are enough for w and b.

    ``between_images`` is added beside ``consistency_score``.
    """
    if images_per_prompt < LEAST_IMAGES:
        raise ConfigError(
            f"--images_per_prompt {images_per_prompt} must be at least {LEAST_IMAGES}"
        )
    if options.datasets:
        raise ConfigError(
            "--images_per_prompt measures one prompt set: add --config.datasets={} and "
            "--config.dataset=FOLDER"
        )
    test = options.test
    rewards = dict(test.reward_fn or options.train.reward_fn)
    kwargs = options.train.reward_fn_kwargs | test.reward_fn_kwargs
    if not pairs_of(map(short_name, rewards)):
        if "consistency_score" not in rewards:
            names = ", ".join(rewards)
            raise ConfigError(
                f"--images_per_prompt needs the test reward consistency_score, not only {names}"
            )
        rewards["between_images"] = 1.0
        kwargs["between_images"] = kwargs.get("consistency_score", {})
    return dataclasses.replace(
        options, test=dataclasses.replace(test, reward_fn=rewards, reward_fn_kwargs=kwargs)
    )
