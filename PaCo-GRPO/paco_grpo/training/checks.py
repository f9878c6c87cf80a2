"""Checks before weights are loaded: mistakes that otherwise end, or spoil, a run after hours."""

import dataclasses
import importlib.util
import logging
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch

from paco_grpo.advantages.aggregation import describe
from paco_grpo.checkpoint.files import check_writable  # noqa: F401 - a check too
from paco_grpo.data.prompts import DataError, load_prompts
from paco_grpo.objectives import Objective, get_objective
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.policies import fewest_steps, policy_class, size_multiple
from paco_grpo.policies.loading import local_folder
from paco_grpo.policies.lora import find_lora
from paco_grpo.policies.speed import attention_problem
from paco_grpo.suggest import did_you_mean
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_TEXT_MULTIPLE = 64  # tokens: what attention kernels and matrix products divide well


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise a ``ConfigError`` with a line for each of ``problems``, which begin with the option's name."""
    if lines := [f"config.{problem}" for problem in problems]:
        raise ConfigError("\n".join(lines))


def check_run(options: RunOptions) -> Objective:
    """Refuse options that contradict each other, the objective, the rewards or the model; returns the objective."""
    train, problems, objective = options.train, contradictions(options), None
    for name in ("train.use_8bit_adam", "pretrained.quantize"):
        value = attrgetter(name)(options)
        if value and importlib.util.find_spec("bitsandbytes") is None:
            problems.append(
                f"{name}={value!r} needs bitsandbytes: pip install 'paco-grpo[quantize]'"
            )
    if options.speed.attention is not None and (
        problem := attention_problem(options.speed.attention)
    ):
        problems.append(f"speed.attention={problem}")
    try:
        describe(train.aggregate_fn)
        objective_class = get_objective(train.loss_type)
        problems += objective_class.check(options)
        objective = objective_class(train)
    except ValueError as error:
        problems.append(str(error).removeprefix("config."))
    if objective and objective.snapshots and not options.use_lora:
        problems.append(
            f"use_lora=False cannot be used with train.loss_type={train.loss_type!r}: its old policy is an adapter"
        )
    raise_if_any(problems)
    if options.sample.num_images_per_prompt == 1 and options.per_prompt_stat_tracking:
        logger.warning(
            "config.sample.num_images_per_prompt=1: images of different prompts are compared with each other"
        )
    if train.learning_rate == 0:
        logger.warning("config.train.learning_rate=0: nothing is trained")
    check_model(options)
    return objective


def contradictions(options: RunOptions) -> list[str]:
    """A line for each contradiction, beginning with an option's name."""
    sample, train, kind = options.sample, options.train, options.pretrained.quantize
    steps, group, latents = (
        sample.noise_steps,
        sample.num_images_per_prompt,
        sample.latents_per_prompt,
    )
    rules = (
        (not options.dataset, "dataset is empty; give the folder of the prompt set"),
        (not any(train.reward_fn.values()),
         "train.reward_fn gives no reward a weight, such as --config.train.reward_fn.jpeg_compressibility=1"),
        (max(steps, default=0) >= sample.num_steps,
         f"sample.noise_steps={steps}: with sample.num_steps={sample.num_steps}, steps are 0 to {sample.num_steps - 1}"),
        ((sample.num_noise_steps or 0) > len(steps), "sample.num_noise_steps is more than sample.noise_steps has"),
        (train.timesteps == (), "train.timesteps is empty; None trains on every noise step"),
        (group % latents, f"sample.latents_per_prompt={latents} does not divide the {group} images of a group"),
        (train.reference == "start" and train.lora_path is None, "train.reference='start' needs train.lora_path"),
        (train.lora_path is not None and not options.use_lora, "train.lora_path needs use_lora=True"),
        (train.beta > 0 and not options.use_lora,
         "use_lora=False cannot be used with train.beta > 0: the reference is the model without its adapter"),
        (kind and not options.use_lora, "pretrained.quantize needs use_lora=True: quantized weights cannot be trained"),
        (kind and options.speed.compile, "speed.compile is not supported with pretrained.quantize"),
    )  # fmt: skip
    rewards = {**train.reward_fn, **options.test.reward_fn}
    unknown = [
        f"{split}.reward_fn_kwargs has {name!r}, which is not a reward of this run.{did_you_mean(name, rewards)}"
        for split in ("train", "test")
        for name in getattr(options, split).reward_fn_kwargs
        if name not in rewards
    ]
    return [problem for applies, problem in rules if applies] + unknown


def check_model(options: RunOptions) -> None:
    """Refuse what the model cannot do; only its small configuration files are read."""
    model, sample, problems = options.pretrained.model, options.sample, []
    multiple, fewest = size_multiple(model), fewest_steps(model)
    for name, steps in (("sample", sample.num_steps), ("test", options.test.num_steps)):
        if steps < fewest:
            problems.append(
                f"{name}.num_steps={steps} must be at least {fewest}: {model}'s schedule ends above σ = 0"
            )
    for name, resolution in (
        ("train", options.train.resolution),
        ("test", options.test.resolution),
    ):
        if resolution % multiple:
            problems.append(
                f"{name}.resolution={resolution} is not a multiple of {multiple}, as {model} needs"
            )
    raise_if_any(problems)
    if options.train.lora_path is not None:
        find_lora(options.train.lora_path)


def require_promised_gpu(environment: Mapping[str, str]) -> None:
    """Refuse a machine whose GPUs torch does not see (often an old driver), unless ``ACCELERATE_USE_CPU`` is set."""
    if torch.cuda.is_available() or environment.get("ACCELERATE_USE_CPU", "").lower() in (
        "1",
        "true",
        "yes",
    ):
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    promised = bool(visible) and visible != "-1"
    if visible is None and shutil.which("nvidia-smi"):
        promised = (
            "GPU "
            in subprocess.run(
                ["nvidia-smi", "-L"], check=False, capture_output=True, text=True
            ).stdout
        )
    if promised:
        raise ConfigError(
            f"this machine has GPUs, but torch {torch.__version__} sees none: update the driver or install a torch for it, "
            "or set ACCELERATE_USE_CPU=true to use the CPU"
        )


def check_items(options: RunOptions, splits: Mapping[str, list[Item]]) -> None:
    """Raise a ``DataError`` unless an editor's items have reference images, any other's none, and sizes hold a token."""
    model, policy = options.pretrained.model, policy_class(options.pretrained.model)
    for split, items in splits.items():
        where = f"the {split} items"
        fewest, most = (count(item.num_images for item in items) for count in (min, max))
        for applies, problem in (
            (
                policy.needs_image and not fewest,
                "edits images, but {} have none (prompt_fn 'geneval_image' has them)",
            ),
            (
                most and not policy.edits_images,
                "generates from text alone, but {} have reference images",
            ),
            (most > 1 and not policy.several_images, "edits one image, but {} have several"),
        ):
            if applies:
                raise DataError(f"config.pretrained.model={model} {problem.format(where)}")
        sized = [item for item in items if item.height is not None]
        multiple = size_multiple(model) if sized else 0
        if sized and options.item_size == "aspect":
            logger.info(
                "%d of %s have a height and width: item_size='aspect' uses their shape only",
                len(sized),
                where,
            )
        elif small := [item for item in sized if min(item.height, item.width) < multiple]:
            raise DataError(
                f"item {small[0].item_id} of {where} is {small[0].height}x{small[0].width}: with config.item_size="
                f"'exact', both sides need at least {multiple} pixels"
            )


def text_length(options: RunOptions, items: Iterable[Item]) -> int:
    """Text tokens of the run: ``config.max_sequence_length``, or for 0 what the prompts need.

    A warning counts the prompts that will be truncated: two that differ only there are the same to the generator.
    """
    model, length = options.pretrained.model, options.max_sequence_length
    policy = policy_class(model)
    if length > policy.text_limit:
        raise ConfigError(
            f"config.max_sequence_length={length}: {model} supports at most {policy.text_limit}; 0: as needed"
        )
    tokenizer, prompts = load_tokenizer(model), {item.prompt for item in items}
    lengths = [
        len(tokenizer(policy.in_template(tokenizer, prompt), verbose=False).input_ids)
        for prompt in prompts
    ]
    if length == 0:
        length = min(
            policy.text_limit, -(-max(lengths, default=1) // _TEXT_MULTIPLE) * _TEXT_MULTIPLE
        )
    truncated = sum(tokens > length for tokens in lengths) if policy.cuts_text else 0
    if truncated:
        message = "%d of %d prompts are longer than config.max_sequence_length=%d tokens and will be truncated"
        logger.warning(message, truncated, len(lengths), length)
    return length


def with_text_length(options: RunOptions) -> RunOptions:
    """``options`` with the text length that their run was trained with, where ``config.max_sequence_length`` is 0."""
    if options.max_sequence_length:
        return options
    items = [
        item
        for split in ("train", "test")
        for item in load_prompts(options.dataset, split, options.prompt_fn)
    ]
    return dataclasses.replace(options, max_sequence_length=text_length(options, items))


def load_tokenizer(model: str) -> Any:
    """The tokenizer that limits the prompts of ``model``."""
    from transformers import AutoTokenizer

    folder = policy_class(model).tokenizer_folder
    # By its own path: as "subfolder", transformers asks for a config.json that tokenizers of pipelines do not have.
    return AutoTokenizer.from_pretrained(
        local_folder(model, f"{folder}/*", option="config.pretrained.model") / folder
    )
