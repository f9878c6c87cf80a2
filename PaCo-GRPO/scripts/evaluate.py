"""Evaluate an adapter, or the base model, as a training run does, or on benchmarks; compare two adapters.

python scripts/evaluate.py --config config/grpo.py:NAME [--config.a.b=value …] [--adapter DIR] [--output DIR]
    --adapter DIR   a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it out for the base model
    --against DIR   another adapter, or `base`: same prompts and seeds, differences paired by prompt
    --benchmarks t2is,gedit[=FOLDER]   instead of the configuration's test set and rewards. t2is: consistency_score,
                    subfig_clipT and pickscore on T2IS prompts; gedit: the editing questions on GEdit-Bench's edits. The
                    sets are made by dataset/fetch.py, the judge is the configuration's (vllm_server/launch.sh)
    --images_per_prompt K   at least 4: also κ, agreement beyond chance (docs/rewards.md), from K noises for each prompt
    --output DIR    images, scores, sheet.png, results.md, results.json; of the other adapter in DIR/against
The same command continues where it stopped: images that are there are kept, and what is complete is not scored again.
With `accelerate launch`, several processes share the images.
"""

import argparse
import dataclasses
import gc
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path

from paco_grpo.data.prompts import load_prompts
from paco_grpo.distributed.launch import start_processes
from paco_grpo.distributed.processes import main_decides
from paco_grpo.evaluation.agreement import agreement, measuring, table
from paco_grpo.evaluation.benchmarks import begin, markdown, options_for, summarize_prompts
from paco_grpo.evaluation.evaluate import evaluate
from paco_grpo.evaluation.pictures import read_rows
from paco_grpo.options import RunOptions, read_options
from paco_grpo.policies.lora import add_lora, remove_lora
from paco_grpo.rewards.queue import ScoringError
from paco_grpo.rewards.registry import build_rewards, write_records
from paco_grpo.training import checks
from paco_grpo.training.build import (
    USER_ERRORS,
    apply_speed,
    find_adapter,
    load_generator,
    test_reward_kwargs,
)
from paco_grpo.training.plan import merges_lora

BASE = "base"
logger = logging.getLogger("evaluate")


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done, 2 refused, 3 a reward failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter")
    parser.add_argument("--against")
    parser.add_argument("--benchmarks", default="")
    parser.add_argument("--images_per_prompt", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("evaluation"))
    own, rest = parser.parse_known_args(arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if is_main else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        checks.require_promised_gpu(os.environ)
        shown = evaluate_all(read_options(rest)[0], own)
    except ScoringError as error:
        print(f"error: a reward failed: {error}", file=sys.stderr)
        return 3
    except (*USER_ERRORS, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if is_main:
        print(f"{shown}images, scores and sheets are in {own.output}")
    return 0


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
    checks.text_length(options, items)  # warns of prompts that will be truncated
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
