"""The work of scripts/evaluate.py: images and scores of one or two adapters, and their tables."""

import argparse
import dataclasses
import gc
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator

from paco_grpo.atomic import write_atomically
from paco_grpo.data.prompts import load_prompts
from paco_grpo.distributed.launch import start_processes
from paco_grpo.distributed.processes import Replicated, main_decides
from paco_grpo.evaluation.agreement import agreement, measuring, table
from paco_grpo.evaluation.benchmarks import options_for
from paco_grpo.evaluation.evaluate import Evaluation
from paco_grpo.evaluation.folder import is_complete
from paco_grpo.evaluation.intervals import markdown, reward_intervals
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.options import RunOptions
from paco_grpo.policies.adapters import add_lora, remove_lora
from paco_grpo.policies.loading import text_length
from paco_grpo.rewards.registry import Reward, build_rewards, write_records
from paco_grpo.training import checks
from paco_grpo.training.build import (
    apply_speed,
    evaluation_reward_kwargs,
    find_adapter,
    load_generator,
)
from paco_grpo.training.plan import merges_lora
from paco_grpo.types import Item

BASE = "base"
DIFFERENCE = "difference"  # column of the results
logger = logging.getLogger("evaluate")


class PromptSet(NamedTuple):
    """Prompts with the options and rewards of their evaluation."""

    options: RunOptions
    items: list[Item]
    rewards: dict[str, Reward]


def evaluate_all(options: RunOptions, command: argparse.Namespace) -> str:
    """Evaluate the adapter and its opponent, on all benchmarks; returns the tables.

    Without benchmarks, on the configuration's test set. All sets, rewards and adapters are checked
    before anything is sampled.
    """
    options = checks.with_text_length(options)
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
    prompt_sets = {}
    for folder, set_options in options_of.items():
        prompt_sets[folder] = prepare(set_options, accelerator, folder, images_per_prompt)
    for folder, prompt_set in prompt_sets.items():
        adapter_of = {folder / name: adapter for name, adapter in adapters.items()}
        sample_adapters(prompt_set, strategy, adapter_of)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return ""
    tables = []
    for folder in prompt_sets:
        tables_of_set = results(folder, command.adapter, command.against)
        tables.append(f"## {folder.name}\n\n{tables_of_set}" if has_benchmarks else tables_of_set)
    return "\n".join(tables)


def _adapter(place: str | None, option: str) -> Path | None:
    """The adapter's folder; None for the base model."""
    return find_adapter(place, option) if place and place != BASE else None


def prepare(
    options: RunOptions, accelerator: Accelerator, folder: Path, images_per_prompt: int
) -> PromptSet:
    """Read and check the prompts, and build rewards that have answered."""
    checks.check_writable(folder, option="--output")
    items = load_prompts(options.dataset, "test", options.prompt_fn)
    checks.check_items(options, {"test": items})
    if images_per_prompt > 1:
        test = dataclasses.replace(options.test, num_images=images_per_prompt * len(items))
        options = dataclasses.replace(options, test=test)
        if not any(item.metadata.get("open") for item in items):
            logger.warning(
                "no prompt is open, so there is no w − b; python dataset/fetch.py t2is --open_twins "
                "makes some"
            )
    text_length(options, items)  # warns of prompts that will be truncated
    kwargs = evaluation_reward_kwargs(options)
    rewards = build_rewards(dict.fromkeys(kwargs, 1.0), kwargs, accelerator.device)
    for reward in rewards.values():
        reward.check()
        reward.check_items(items)
    if accelerator.is_main_process:
        write_records(rewards, folder)
    return PromptSet(options, items, rewards)


def sample_adapters(
    prompt_set: PromptSet, strategy: Replicated, adapters: Mapping[Path, Path | None]
) -> None:
    """Write images and scores of each adapter (None: the base model) to its folder.

    The generator is loaded once for all, unless its weights are sharded or compiled: those do not
    take another adapter.
    """
    options, items, rewards = prompt_set
    takes_another = not (strategy.lockstep or options.speed.compile)
    policy = None
    attached = None  # the adapter of ``policy``
    for folder, adapter in adapters.items():
        check = partial(is_complete, folder, options, items, rewards, adapter)
        if main_decides(strategy.accelerator, check):
            continue
        logger.info("evaluating %s", adapter or f"the base model {options.pretrained.model}")
        if policy is not None and not takes_another:
            policy = None
            attached = None
            gc.collect()
        is_new = policy is None
        if is_new:
            policy = load_generator(options, strategy.loading_device)
        if attached is not None:
            remove_lora(policy)
        if adapter is not None:
            option = "--against" if folder.name == "against" else "--adapter"
            add_lora(policy, lora_path=adapter, option=option)
        attached = adapter
        if is_new:
            strategy.place(policy)
            apply_speed(options, policy)
        merge_lora = adapter is not None and merges_lora(options, policy.device)
        evaluation = Evaluation(policy, items, rewards, options, strategy, merge_lora)
        metrics = evaluation.run(folder, keep_images=True)
        if strategy.accelerator.is_main_process:
            write_atomically(folder / "metrics.json", json.dumps(metrics, indent=1))


def results(folder: Path, adapter: str | None, against: str | None) -> str:
    """The tables of one test set, also as ``results.md`` and ``results.json`` in ``folder``."""
    name = adapter or BASE
    rows = read_rows(folder)
    agreements = {name: agreement(rows)}
    columns = {name: reward_intervals(rows)}
    if against is not None:
        other = f"{against} (against)" if against in (name, DIFFERENCE) else against
        other_rows = read_rows(folder / "against")
        agreements[other] = agreement(other_rows)
        agreements[DIFFERENCE] = agreement(rows, other_rows)
        columns[other] = reward_intervals(other_rows)
        columns[DIFFERENCE] = reward_intervals(rows, other_rows)
    missing = {}
    for reward in rows[0]["rewards"]:
        missing[reward] = sum(row["rewards"][reward] is None for row in rows)
    record = {
        "adapter": name,
        "against": against,
        "missing": missing,
        "results": columns,
        "agreement": agreements,
    }
    text = json.dumps(record, indent=1, default=dataclasses.asdict)
    write_atomically(folder / "results.json", text)
    tables = markdown(columns)
    if agreements[name]:
        tables += "\n" + table(agreements)
    write_atomically(folder / "results.md", tables)
    return tables
