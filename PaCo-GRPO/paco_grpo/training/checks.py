"""Checks that need to know objectives, models, rewards or this machine; all run before weights are loaded."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from paco_grpo.advantages.aggregation import describe
from paco_grpo.data.prompts import KINDS, DataError
from paco_grpo.monitoring.trackers import TRACKERS
from paco_grpo.objectives import Objective, get_objective
from paco_grpo.options import ConfigError, RunOptions, did_you_mean, find_problems, refuse
from paco_grpo.policies import PolicyLoadError, fewest_steps, policy_class, size_multiple, transformer_bytes
from paco_grpo.policies.lora import find_lora
from paco_grpo.policies.performance import AccelerationError, quantize
from paco_grpo.policies.performance.attention import attention_problem, try_attention
from paco_grpo.policies.performance.compile import require_compiler
from paco_grpo.rewards.registry import RewardError, find_factory, reward_weights
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_LARGE = 4e9  # bytes of a transformer, for a CPU
_TEXT_MULTIPLE = 64  # tokens: what attention kernels and matrix products divide well


def check_run(options: RunOptions) -> Objective:
    """Refuse options that contradict each other, the objective, the rewards or the model.

    Only small configuration files of the model are read, or fetched from the hub.

    Returns:
        The objective.

    Raises:
        ConfigError: All problems found, one line each; every line names the option to change.
        PolicyLoadError: The model or LoRA does not exist or cannot be reached.
    """
    problems = find_problems(options)
    for name, known in (("prompt_fn", KINDS), ("logging_platform", TRACKERS)):
        problems += _not_among(name, getattr(options, name), known)
    problems += _not_among("pretrained.quantize", options.pretrained.quantize, (None, *quantize.KINDS))
    problems += _library_problems(options)
    problems += _reward_problems(options)
    try:
        describe(options.train.aggregate_fn)
    except ValueError as error:
        problems.append(str(error).removeprefix("config."))
    objective = None
    try:
        objective = get_objective(options.train.loss_type)
    except ValueError as error:
        problems.append(str(error).removeprefix("config."))
    else:
        problems += _objective_problems(options, objective)
    refuse(problems)
    check_model(options)
    return objective


def _not_among(name: str, value: object, known: Iterable) -> Iterator[str]:
    names = [str(choice) for choice in known if choice]
    if value is not None and value not in names:
        yield f"{name}={value!r} is unknown.{did_you_mean(str(value), names)} Known: {', '.join(names)}"


def _objective_problems(options: RunOptions, objective: Objective) -> Iterator[str]:
    train, sample = options.train, options.sample
    yield from objective.check(options)
    images = sample.unique_sample_num_per_epoch * sample.num_images_per_prompt
    steps = train.gradient_step_per_epoch or objective.gradient_steps
    if steps > images:
        yield f"train.gradient_step_per_epoch={steps} is more than the {images} images of an epoch"
    if train.decay_type and not objective.snapshots:
        yield f"train.decay_type={train.decay_type} has no effect: train.loss_type={train.loss_type!r} keeps no old policy"
    if not options.use_lora and objective.snapshots:
        yield f"use_lora=False cannot be used with train.loss_type={train.loss_type!r}: its old policy is an adapter"


def _library_problems(options: RunOptions) -> Iterator[str]:
    for name, value in (
        ("pretrained.quantize", options.pretrained.quantize),
        ("sample.tail_weights", options.sample.tail_weights),
    ):
        if value in quantize.KINDS and (problem := quantize.missing_library()):
            yield f"{name}={value!r}: {problem}"
    if options.speed.attention is not None and (problem := attention_problem(options.speed.attention)):
        yield f"speed.attention={problem}"
    if options.train.use_8bit_adam and importlib.util.find_spec("bitsandbytes") is None:
        yield "train.use_8bit_adam=True needs bitsandbytes: pip install 'paco-grpo[adam8bit]', or set it to False"


def _reward_problems(options: RunOptions) -> Iterator[str]:
    def problem_of(action: Callable[[], object]) -> Iterator[str]:
        try:
            action()
        except RewardError as error:
            yield f"{group}.reward_fn: {error}"

    for group in ("train", "test"):
        table = getattr(options, group).reward_fn
        yield from problem_of(lambda: reward_weights(dict.fromkeys(table, 1.0)))  # noqa: B023 - called at once
        for name in table:
            yield from problem_of(lambda: find_factory(name))  # noqa: B023 - called at once


def check_model(options: RunOptions) -> None:
    """Refuse what the model cannot do; see ``check_run``."""
    model, sample, problems = options.pretrained.model, options.sample, []
    if not policy_class(model).has_true_cfg and sample.negative_prompt is not None:
        problems.append(
            f"sample.negative_prompt={sample.negative_prompt!r} is set, but the guidance of {model} is embedded, not true "
            "CFG: leave it at None"
        )
    multiple, fewest = size_multiple(model), fewest_steps(model)
    for group, steps in (("sample", sample.num_steps), ("test", options.test.num_steps)):
        if steps < fewest:
            problems.append(f"{group}.num_steps={steps} must be at least {fewest}: {model}'s schedule ends above σ = 0")
    for group in ("train", "test"):
        resolution = getattr(options, group).resolution
        if resolution % multiple:
            problems.append(f"{group}.resolution={resolution} is not a multiple of {multiple}, as {model} needs")
    refuse(problems)
    if options.use_lora and options.train.lora_path is not None:
        find_lora(options.train.lora_path)


def check_device(options: RunOptions, device: torch.device) -> None:
    """Try what a run would otherwise find missing after its weights are loaded; warn of a large model on a CPU.

    Raises:
        ConfigError: A compiler or an attention kernel is missing, or does not work here.
    """
    stored = transformer_bytes(options.pretrained.model) if device.type == "cpu" else 0
    if stored > _LARGE:  # nearly always an accident: a hidden GPU, or torch without CUDA
        logger.warning(
            "config.pretrained.model=%s has %.0f GB of transformer weights, and torch %s sees no GPU: a step will take "
            "minutes, if there is enough memory", options.pretrained.model, stored / 1e9, torch.__version__,
        )  # fmt: skip
    try:
        if options.speed.compile:
            require_compiler()
    except AccelerationError as error:
        raise ConfigError(f"config.speed.compile=True: {error}. Install one, or set it to False") from error
    if options.speed.attention is None:
        return
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    try:
        try_attention(options.speed.attention, device, dtype, policy_class(options.pretrained.model).masks_text)
    except AccelerationError as error:
        raise ConfigError(f"config.speed.attention: {error}. None uses diffusers' default") from error


def check_images(options: RunOptions, splits: Mapping[str, list[Item]]) -> None:
    """An editor needs items with reference images, any other generator items without.

    Raises:
        DataError: It is otherwise.
    """
    edits_images = policy_class(options.pretrained.model).edits_images
    where = f"of config.dataset={options.dataset}"
    for split, items in splits.items():
        has_images = items[0].image is not None  # a kind of prompt set has them everywhere or nowhere
        if edits_images and not has_images:
            raise DataError(
                f"config.pretrained.model={options.pretrained.model} edits images, but the {split} items {where} have none: "
                f"config.prompt_fn={options.prompt_fn!r} reads only text, use 'geneval_image' or 'arrow_editing'"
            )
        if has_images and not edits_images:
            raise DataError(
                f"config.pretrained.model={options.pretrained.model} generates from text alone, but the {split} items {where} "
                f"have reference images (config.prompt_fn={options.prompt_fn!r}): use config.prompt_fn=geneval, or an "
                "editing model"
            )


def check_writable(folder: Path, needed_bytes: int = 0) -> None:
    """Refuse a folder that cannot be written to or lacks space.

    Raises:
        ConfigError: It names the folder and ``config.save_dir``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_probe_{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or error}); set config.save_dir to a folder you may write to"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ConfigError(
            f"{folder} has {free / 2**20:.0f} MiB free, but checkpoints of this run need about "
            f"{needed_bytes / 2**20:.0f} MiB; free some space or set config.save_dir elsewhere"
        )


def text_length(options: RunOptions, items: Iterable[Item]) -> int:
    """Text tokens of the run: ``config.max_sequence_length``, or for 0 what the prompts need.

    Prompts that will be truncated are counted in a warning: two that differ only there are the same to the generator.

    Raises:
        ConfigError: It is more than the model supports.
        PolicyLoadError: The model does not exist, or has no tokenizer.
    """
    model, length = options.pretrained.model, options.max_sequence_length
    policy = policy_class(model)
    if length > policy.text_limit:
        raise ConfigError(
            f"config.max_sequence_length={length} is more than {model} supports: at most {policy.text_limit}, or 0 for the "
            "longest prompt of the data set"
        )
    prompts = sorted({item.prompt for item in items})
    lengths = count_tokens(model, policy.tokenizer_folder, prompts)
    longest = max(lengths, default=1)
    if length == 0:
        length = min(policy.text_limit, -(-longest // _TEXT_MULTIPLE) * _TEXT_MULTIPLE)
        logger.info(
            "max_sequence_length: %d text tokens for prompts of at most %d tokens (the model supports %d)",
            length, longest, policy.text_limit,
        )  # fmt: skip
    truncated = sum(count > length for count in lengths)
    if truncated:
        logger.warning(
            "%d of %d prompts are longer than config.max_sequence_length=%d tokens and will be truncated (the longest has %d)",
            truncated, len(lengths), length, longest,
        )  # fmt: skip
    return length


def count_tokens(model: str, tokenizer_folder: str, texts: Sequence[str]) -> list[int]:
    """Tokens of each of ``texts``, special ones included, by the tokenizer in ``tokenizer_folder`` of a pipeline.

    Raises:
        PolicyLoadError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    folder = Path(model).expanduser()
    try:
        # A local folder by its own path: given as "subfolder", some tokenizers are looked for on the hub.
        tokenizer = (
            AutoTokenizer.from_pretrained(folder / tokenizer_folder)
            if folder.is_dir()
            else AutoTokenizer.from_pretrained(model, subfolder=tokenizer_folder)
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise PolicyLoadError(
            f"cannot load the tokenizer in {model}/{tokenizer_folder} ({type(error).__name__}: {str(error)[:300]}). "
            "The folder may be incomplete: download or build it again."
        ) from error
    return [len(tokens) for tokens in tokenizer(list(texts)).input_ids] if texts else []
