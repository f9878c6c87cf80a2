"""The work of scripts/evaluate.py: images and scores of one or two adapters, and tables of their differences."""

import argparse
import dataclasses
import gc
import json
import logging
from functools import partial
from pathlib import Path

from paco_grpo.atomic import write_atomically
from paco_grpo.data.prompts import load_prompts
from paco_grpo.distributed.launch import start_processes
from paco_grpo.distributed.processes import main_decides
from paco_grpo.evaluation.agreement import agreement, measuring, table
from paco_grpo.evaluation.benchmarks import markdown, options_for, summarize_prompts
from paco_grpo.evaluation.evaluate import Evaluation
from paco_grpo.evaluation.folder import is_complete
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.options import RunOptions
from paco_grpo.policies.loading import text_length
from paco_grpo.policies.lora import add_lora, remove_lora
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.training import checks
from paco_grpo.training.build import (
    apply_speed,
    evaluation_reward_kwargs,
    find_adapter,
    load_generator,
)
from paco_grpo.training.plan import merges_lora

BASE = "base"
DIFFERENCE = "difference"  # column of the results
logger = logging.getLogger("evaluate")


def evaluate_all(options: RunOptions, own: argparse.Namespace) -> str:
    """Every benchmark (or the configuration's test set) with the adapter and its opponent; returns the tables.

    All sets, rewards and adapters are checked before anything is sampled.
    """
    options = checks.with_text_length(options)
    benchmarks = [name for name in own.benchmarks.split(",") if name]
    sets = {own.output / name.partition("=")[0]: options_for(options, name) for name in benchmarks}
    if not benchmarks:
        sets = {own.output: options}
    images_per_prompt = own.images_per_prompt
    if images_per_prompt != 1:
        for folder in sets:
            sets[folder] = measuring(sets[folder], images_per_prompt)
    for set_options in sets.values():
        checks.check_run(set_options)
    adapters = {"": _adapter(own.adapter, "--adapter")}  # by folder below the set's
    if own.against:
        adapters["against"] = _adapter(own.against, "--against")
    strategy = start_processes(options)
    accelerator = strategy.accelerator
    prepared = {}
    for folder, set_options in sets.items():
        prepared[folder] = prepare(set_options, accelerator, folder, images_per_prompt)
    for folder, (set_options, items, rewards) in prepared.items():
        adapter_of = {folder / name: adapter for name, adapter in adapters.items()}
        sample_adapters(set_options, items, rewards, strategy, adapter_of)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return ""
    tables = []
    for folder in sets:
        table_of_set = results(folder, own.adapter, own.against)
        tables.append(f"## {folder.name}\n\n{table_of_set}" if benchmarks else table_of_set)
    return "\n".join(tables)


def _adapter(place: str | None, option: str) -> Path | None:
    return find_adapter(place, option) if place and place != BASE else None


def prepare(options: RunOptions, accelerator, folder: Path, images_per_prompt: int) -> tuple:
    """Options with the number of images, items, and rewards that have answered."""
    checks.check_writable(folder, option="--output")
    items = load_prompts(options.dataset, "test", options.prompt_fn)
    checks.check_items(options, {"test": items})
    if images_per_prompt > 1:
        test = dataclasses.replace(options.test, num_images=images_per_prompt * len(items))
        options = dataclasses.replace(options, test=test)
        if not any(item.metadata.get("open") for item in items):
            logger.warning(
                "no prompt is open, so there is no κ; python dataset/fetch.py t2is --open_twins makes some"
            )
    text_length(options, items)  # warns of prompts that will be truncated
    kwargs = evaluation_reward_kwargs(options)
    rewards = build_rewards(dict.fromkeys(kwargs, 1.0), kwargs, accelerator.device)
    for reward in rewards.values():
        reward.check()
        reward.check_items(items)
    if accelerator.is_main_process:
        write_records(rewards, folder)
    return options, items, rewards


def sample_adapters(
    options: RunOptions, items: list, rewards: dict, strategy, adapters: dict
) -> None:
    """Images and scores of each adapter (None: the base model) in its folder; the generator is loaded once for all."""
    # Neither sharded nor compiled weights take another adapter.
    exchanges = not (strategy.lockstep or options.speed.compile)
    policy, attached = None, False
    for folder, adapter in adapters.items():
        check = partial(is_complete, folder, options, items, rewards, adapter)
        if main_decides(strategy.accelerator, check):
            continue
        logger.info("evaluating %s", adapter or f"the base model {options.pretrained.model}")
        if not exchanges:
            policy, attached = None, False
            gc.collect()
        fresh = policy is None
        if fresh:
            policy = load_generator(options, strategy.loading_device)
        if attached:
            remove_lora(policy)
        attached = adapter is not None
        if attached:
            add_lora(policy, lora_path=adapter)
        if fresh:
            strategy.place(policy)
            apply_speed(options, policy)
        merge = attached and merges_lora(options, policy.device)
        evaluation = Evaluation(policy, items, rewards, options, strategy, merge)
        metrics = evaluation.run(folder, keep_images=True)
        if strategy.accelerator.is_main_process:
            write_atomically(folder / "metrics.json", json.dumps(metrics, indent=1))


def results(folder: Path, adapter: str | None, against: str | None) -> str:
    """The tables of one test set, also as ``results.md`` and ``results.json`` in ``folder``."""
    name = adapter or BASE
    rows = read_rows(folder)
    agreements = {name: agreement(rows)}
    columns = {name: summarize_prompts(rows)}
    if against is not None:
        other = f"{against} (against)" if against in (name, DIFFERENCE) else against
        other_rows = read_rows(folder / "against")
        agreements[other] = agreement(other_rows)
        agreements[DIFFERENCE] = agreement(rows, other_rows)
        columns[other] = summarize_prompts(other_rows)
        columns[DIFFERENCE] = summarize_prompts(rows, other_rows)
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
