"""An evaluation without a training run."""

from __future__ import annotations

import logging
from pathlib import Path

from ml_collections import ConfigDict

from paco_grpo.data.prompts import load_prompts
from paco_grpo.rewards.registry import build_rewards
from paco_grpo.training.checks import check_config, check_images, check_model, check_writable
from paco_grpo.training.engine import build_accelerator, build_engine
from paco_grpo.training.evaluation import evaluate
from paco_grpo.training.generator import load_adapter, load_generator
from paco_grpo.training.processes import set_threads
from paco_grpo.training.reward_sets import test_reward_kwargs
from paco_grpo.training.speed import apply_speed, check_speed
from paco_grpo.training.texts import settle_text_length

logger = logging.getLogger(__name__)


def evaluate_alone(config: ConfigDict, adapter: str | None, output: Path) -> dict[str, float] | None:
    """Draw and score the test set of ``config`` with ``adapter`` (None = the base model) into the folder ``output``.

    Returns:
        Metrics as :func:`paco_grpo.training.evaluation.evaluate`, on the main process; None on the others.

    Raises:
        ConfigError, DataError, RewardError, JudgeError, PolicyLoadError: Before anything is drawn.
        ScoringError: A reward failed.
    """
    check_config(config)
    check_model(config)
    accelerator = build_accelerator()
    engine = build_engine(config, accelerator)
    set_threads(config.num_threads, accelerator.num_processes)
    check_writable(output)
    items = load_prompts(config.dataset, "test", config.prompt_fn)
    check_images(config, {"test": items})
    every = (
        [*items, *load_prompts(config.dataset, "train", config.prompt_fn)] if config.max_sequence_length == 0 else items
    )
    settle_text_length(config, every)
    check_speed(config, accelerator.device)
    kwargs = test_reward_kwargs(config)
    rewards = build_rewards(dict.fromkeys(kwargs, 1.0), kwargs, accelerator.device)
    for reward in rewards.values():
        reward.check()
    policy = load_generator(config, engine.loading_device)
    if adapter is None:
        config.use_lora = False  # nothing to merge
        logger.info("no --adapter: the base model %s is evaluated", config.pretrained.model)
    else:
        load_adapter(policy, adapter)
    engine.place(policy)
    apply_speed(config, policy)
    joint = engine.joint_forwards
    metrics = evaluate(policy, items, rewards, config, accelerator, output, lambda: False, joint_forwards=joint)
    is_main = accelerator.is_main_process
    accelerator.end_training()
    return metrics if is_main else None
