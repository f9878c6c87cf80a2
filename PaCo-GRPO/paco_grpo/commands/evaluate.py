"""The work of scripts/evaluate.py: images and scores of one or two adapters, and tables of their differences."""

import argparse
import dataclasses
import gc
import json
import logging
from functools import partial
from pathlib import Path

from paco_grpo.data.prompts import load_prompts
from paco_grpo.distributed.launch import start_processes
from paco_grpo.distributed.processes import main_decides
from paco_grpo.evaluation.agreement import agreement, measuring, table
from paco_grpo.evaluation.benchmarks import begin, markdown, options_for, summarize_prompts
from paco_grpo.evaluation.evaluate import evaluate
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.options import RunOptions
from paco_grpo.policies.loading import text_length
from paco_grpo.policies.lora import add_lora, remove_lora
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.training import checks
from paco_grpo.training.build import (
    apply_speed,
    find_adapter,
    load_generator,
    test_reward_kwargs,
)
from paco_grpo.training.plan import merges_lora

BASE = "base"
logger = logging.getLogger("evaluate")


def evaluate_all(options: RunOptions, own: argparse.Namespace) -> str:
    """Every benchmark (or the configuration's test set) with the adapter and its opponent; returns the tables.

    All sets, rewards and adapters are checked before anything is sampled.
    """
    names, options = (
        [name for name in own.benchmarks.split(",") if name],
        checks.with_text_length(options),
    )
    sets = {own.output / name.partition("=")[0]: options_for(options, name) for name in names} or {
        own.output: options
    }
    if own.images_per_prompt != 1:
        sets = {folder: measuring(each, own.images_per_prompt) for folder, each in sets.items()}
    for each in sets.values():
        checks.check_run(each)
    adapters = {"": own.adapter} | ({"against": own.against} if own.against else {})
    adapters = {
        name: find_adapter(place) if place and place != BASE else None
        for name, place in adapters.items()
    }
    strategy = start_processes(options)
    accelerator, count = strategy.accelerator, own.images_per_prompt
    prepared = {folder: prepare(each, accelerator, folder, count) for folder, each in sets.items()}
    for folder, (ready, items, rewards) in prepared.items():
        sample_adapters(
            ready,
            items,
            rewards,
            strategy,
            {folder / name: each for name, each in adapters.items()},
        )
    accelerator.end_training()
    if not accelerator.is_main_process:
        return ""
    tables = {folder.name: results(folder, own.adapter, own.against) for folder in sets}
    return "\n".join(f"## {name}\n\n{shown}" if names else shown for name, shown in tables.items())


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
    kwargs = test_reward_kwargs(options)
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
        if main_decides(
            strategy.accelerator, partial(begin, folder, options, items, rewards, adapter)
        ):
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
        metrics = evaluate(
            policy, items, rewards, options, strategy, folder, merge_lora=merge, keep_images=True
        )
        if strategy.accelerator.is_main_process:
            (folder / "metrics.json").write_text(json.dumps(metrics, indent=1), encoding="utf-8")


def results(folder: Path, adapter: str | None, against: str | None) -> str:
    """The tables of one test set, also as ``results.md`` and ``results.json`` in ``folder``."""
    name, rows = adapter or BASE, read_rows(folder)
    agreements, columns = {name: agreement(rows)}, {name: summarize_prompts(rows)}
    if against is not None:
        others = read_rows(folder / "against")
        agreements |= {against: agreement(others), "difference": agreement(rows, others)}
        columns |= {
            against: summarize_prompts(others),
            "difference": summarize_prompts(rows, others),
        }
    missing = {
        name: sum(row["rewards"][name] is None for row in rows) for name in rows[0]["rewards"]
    }
    found = {
        "adapter": name,
        "against": against,
        "missing": missing,
        "results": columns,
        "agreement": agreements,
    }
    (folder / "results.json").write_text(
        json.dumps(found, indent=1, default=dataclasses.asdict), encoding="utf-8"
    )
    shown = markdown(columns) + ("\n" + table(agreements) if agreements[name] else "")
    (folder / "results.md").write_text(shown, encoding="utf-8")
    return shown
