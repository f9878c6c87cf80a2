"""Evaluate an adapter, or the base model, as a training run does: same items, seeds, size, steps and rewards.

python scripts/evaluate.py --config config/grpo.py:NAME [--config.a.b=value …] [--adapter DIR] [--output DIR]
    --adapter DIR   a checkpoint, its adapter/ (PEFT) or diffusers/, or a hub name; leave it out for the base model
    --no_user_code  refuse a configuration that names code outside this repository
    --output DIR    images, eval_data.jsonl, sheet.png, categories.md, metrics.json; default: evaluation
What is sampled and scored is config.test; through `accelerate launch` several processes share the images.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 done, 2 refused, 3 a reward failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter")
    parser.add_argument("--output", type=Path, default=Path("evaluation"))
    own, rest = parser.parse_known_args(arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpcore", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)

    from paco_grpo.options import ConfigError, read_options

    try:
        options, _ = read_options(rest)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from paco_grpo.rewards.queue import ScoringError
    from paco_grpo.training.build import REFUSALS
    from paco_grpo.training.checks import is_disk_full

    try:
        metrics = evaluate_adapter(options, own.adapter, own.output)
        if metrics is not None:
            (own.output / "metrics.json").write_text(json.dumps(metrics, indent=1), encoding="utf-8")
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ScoringError as error:
        print(f"error: a reward failed: {error}", file=sys.stderr)
        return 3
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"error: the disk is full ({error}); free some space, or choose another --output", file=sys.stderr)
        return 2
    if metrics is not None:
        print((own.output / "categories.md").read_text(encoding="utf-8"), end="")
        print(f"{metrics['eval/num_images']:.0f} images, their scores and sheet.png in {own.output}")
    return 0


def evaluate_adapter(options, adapter: str | None, output: Path) -> dict[str, float] | None:
    """Sample and score the test set with ``adapter`` (None = the base model) into the folder ``output``.

    Returns:
        The metrics on the main process, None on the others.

    Raises:
        ConfigError, DataError, RewardError, JudgeError, PolicyLoadError: Before anything is sampled.
        ScoringError: A reward failed.
    """
    from paco_grpo.data.prompts import load_prompts
    from paco_grpo.distributed.launch import start_processes
    from paco_grpo.evaluation.evaluate import evaluate
    from paco_grpo.rewards.registry import build_rewards, write_records
    from paco_grpo.training.build import apply_speed, load_adapter, load_generator, test_reward_kwargs
    from paco_grpo.training.checks import check_device, check_images, check_run, check_writable, text_length
    from paco_grpo.training.plan import merges_lora

    check_run(options)
    strategy = start_processes(options)
    accelerator = strategy.accelerator
    check_writable(output)
    items = load_prompts(options.dataset, "test", options.prompt_fn)
    check_images(options, {"test": items})
    # 0: as in training, where the length follows from both splits.
    train = load_prompts(options.dataset, "train", options.prompt_fn) if options.max_sequence_length == 0 else []
    options = dataclasses.replace(options, max_sequence_length=text_length(options, [*items, *train]))
    check_device(options, accelerator.device)
    kwargs = test_reward_kwargs(options)
    rewards = build_rewards(dict.fromkeys(kwargs, 1.0), kwargs, accelerator.device)
    for reward in rewards.values():
        reward.check()
    if accelerator.is_main_process:
        write_records(rewards, output)
    policy = load_generator(options, strategy.loading_device)
    if adapter is None:
        logging.getLogger(__name__).info("no --adapter: evaluating the base model %s", options.pretrained.model)
    else:
        load_adapter(policy, adapter)
    strategy.place(policy)
    apply_speed(options, policy)
    merge = adapter is not None and merges_lora(options, policy.device)
    metrics = evaluate(policy, items, rewards, options, strategy, output, merge_lora=merge)
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return metrics if is_main else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
