"""Checks before weights are loaded: mistakes that otherwise end, or spoil, a run after hours."""

import dataclasses
import errno
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from paco_grpo.advantages.aggregation import describe
from paco_grpo.checkpoint.files import find_checkpoint
from paco_grpo.data.prompts import DataError, load_prompts
from paco_grpo.objectives import Objective, get_objective
from paco_grpo.options import OPTIONS, ConfigError, RunOptions, load_options
from paco_grpo.policies import fewest_steps, policy_class, size_multiple
from paco_grpo.policies.loading import local_folder
from paco_grpo.policies.lora import find_lora
from paco_grpo.policies.performance.attention import attention_problem
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


def check_writable(folder: Path, needed_bytes: int = 0, option: str = "config.save_dir") -> None:
    """Make ``folder``; a ``ConfigError`` that names ``option`` if it cannot be written to or lacks space."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}); set {option} to another folder"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        sizes = f"{free / 2**20:.0f} MiB free, but checkpoints need about {needed_bytes / 2**20:.0f} MiB"
        raise ConfigError(f"{folder} has {sizes}; free some or change {option}")


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for lack of space or quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


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


# A checkpoint continues what these made; with other values its weights mean something else.
_BOUND = (
    "pretrained.model", "pretrained.image_positions", "use_lora", "train.loss_type", "train.lora_rank", "train.lora_alpha",
    "train.lora_targets", "train.lora_path", "train.reference",
)  # fmt: skip
_UNIMPORTANT = (
    "resume_from",
    "resume_changed",
    "run_name",
    "max_sequence_length",
)  # the last may be derived


def check_earlier_run(options: RunOptions, folder: Path, items: Sequence[Item]) -> dict[str, str]:
    """Refuse a folder that holds a run, unless it is resumed with what its checkpoints were trained with.

    Every option that differs from the saved configuration is logged; those of ``_BOUND``, other training prompts
    (``items``) and other weights in the model's folder are refused unless ``config.resume_changed`` is set. Returns
    hashes of the prompts and the weights, for plan.json.
    """
    prompts = hashlib.sha256(json.dumps([item.prompt for item in items]).encode()).hexdigest()[:16]
    hashes = {
        "prompts": prompts,
        "weights": _hash_weights(Path(options.pretrained.model).expanduser()),
    }
    if not options.resume_from:
        if (folder / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{folder} already holds a run: give --config.resume_from=latest or another run_name"
            )
        return hashes
    checkpoint = find_checkpoint(options.resume_from, folder)
    earlier = folder if checkpoint is None else checkpoint.parents[1]
    if not (earlier / "config.yaml").is_file():
        return hashes
    before, bound = load_options(str(earlier / "config.yaml")), []
    for name in OPTIONS:
        saved, now = (attrgetter(name)(each) for each in (before, options))
        if saved != now and name not in _UNIMPORTANT:
            logger.warning("resuming with another config.%s: %r -> %r", name, saved, now)
            bound += [f"config.{name} ({saved!r} -> {now!r})"] if name in _BOUND else []
    plan = (
        json.loads((earlier / "plan.json").read_text()) if (earlier / "plan.json").is_file() else {}
    )
    for what, option in (("prompts", "dataset"), ("weights", "pretrained.model")):
        if plan.get(what, hashes[what]) != hashes[what]:
            bound.append(f"config.{option} ({attrgetter(option)(options)} holds other {what})")
    if bound and not options.resume_changed:
        raise ConfigError(
            f"{earlier} was trained with another {', '.join(bound)}; or set --config.resume_changed=True"
        )
    return hashes


def _hash_weights(model: Path) -> str:
    """A hash of samples from the transformer's files in a folder; of nothing for a hub name, which has no such files."""
    digest = hashlib.sha256()
    for file in sorted((model / "transformer").glob("*.safetensors")):
        with file.open("rb") as content:
            for part in range(16):
                content.seek(file.stat().st_size * part // 16)
                digest.update(content.read(4096))
    return digest.hexdigest()[:16]
