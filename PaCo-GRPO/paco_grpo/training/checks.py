"""Checks that need to know objectives, models, rewards or this machine; all run before weights are loaded."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paco_grpo.advantages.aggregation import describe
from paco_grpo.checkpoint.files import find_checkpoint
from paco_grpo.data.prompts import DataError
from paco_grpo.objectives import Objective, get_objective
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.options.parse import load_options, options_to_dict
from paco_grpo.policies import PolicyLoadError, fewest_steps, policy_class, size_multiple
from paco_grpo.policies.loading import local_folder
from paco_grpo.policies.lora import find_lora
from paco_grpo.policies.performance import quantize
from paco_grpo.policies.performance.attention import attention_problem, try_attention
from paco_grpo.policies.performance.compile import require_compiler
from paco_grpo.rewards.registry import short_name
from paco_grpo.suggest import did_you_mean
from paco_grpo.types import Item

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TEXT_MULTIPLE = 64  # tokens: what attention kernels and matrix products divide well


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise a ``ConfigError`` with a line for each of ``problems``, which begin with the option's name."""
    if lines := [f"config.{problem}" for problem in problems]:
        raise ConfigError("\n".join(lines))


def check_run(options: RunOptions) -> Objective:
    """Refuse options that contradict each other, the objective, the rewards or the model.

    Only small configuration files of the model are read, or fetched from the hub.

    Returns:
        The objective.

    Raises:
        ConfigError: All problems found, one line each; every line names the option to change.
        PolicyLoadError: The model or LoRA does not exist or cannot be reached.
    """
    train, problems = options.train, contradictions(options)
    if train.use_8bit_adam and importlib.util.find_spec("bitsandbytes") is None:
        problems.append("train.use_8bit_adam=True needs bitsandbytes: pip install 'paco-grpo[adam8bit]'")
    if options.pretrained.quantize and (problem := quantize.missing_library()):
        problems.append(f"pretrained.quantize={options.pretrained.quantize!r}: {problem}")
    if options.speed.attention is not None and (problem := attention_problem(options.speed.attention)):
        problems.append(f"speed.attention={problem}")
    objective = None
    try:
        describe(train.aggregate_fn)
        objective = get_objective(train.loss_type).for_run(train)
    except ValueError as error:
        problems.append(str(error).removeprefix("config."))
    if objective:
        problems += _objective_problems(options, objective)
    raise_if_any(problems)
    if options.sample.num_images_per_prompt == 1 and options.per_prompt_stat_tracking:
        logger.warning("config.sample.num_images_per_prompt=1: images of different prompts are compared with each other")
    if train.learning_rate == 0:
        logger.warning("config.train.learning_rate=0: nothing is trained")
    check_model(options)
    return objective


def contradictions(options: RunOptions) -> list[str]:
    """Options that contradict each other: a line for each, beginning with the option's name."""
    sample, train, kind = options.sample, options.train, options.pretrained.quantize
    steps, group, latents = sample.noise_steps, sample.num_images_per_prompt, sample.latents_per_prompt
    rules = (
        (not options.dataset, "dataset is empty; give the folder of the prompt set"),
        (not train.reward_fn, "train.reward_fn is empty; give a reward: --config.train.reward_fn.jpeg_compressibility=1"),
        (max(steps, default=0) >= sample.num_steps,
         f"sample.noise_steps={steps}: with sample.num_steps={sample.num_steps}, steps are 0 to {sample.num_steps - 1}"),
        ((sample.num_noise_steps or 0) > len(steps), "sample.num_noise_steps is more than sample.noise_steps has"),
        (train.timesteps == (), "train.timesteps is empty; None trains on every noise step"),
        (group % latents, f"sample.latents_per_prompt={latents} does not divide the {group} images of a group"),
        (latents > 1 and not sample.same_latent, "sample.latents_per_prompt has no effect without sample.same_latent"),
        (train.reward_fn and not any(train.reward_fn.values()),
         "train.reward_fn has only rewards of weight 0, which are monitored; give one a weight"),
        (train.reference == "start" and train.lora_path is None, "train.reference='start' needs train.lora_path"),
        (train.lora_path is not None and not options.use_lora, "train.lora_path needs use_lora=True"),
        (train.beta > 0 and not options.use_lora,
         "use_lora=False cannot be used with train.beta > 0: the reference is the model without its adapter"),
        (kind and not options.use_lora, "pretrained.quantize needs use_lora=True: quantized weights cannot be trained"),
        (kind and sample.merge_lora, "sample.merge_lora cannot be used with pretrained.quantize: the LoRA would be rounded away"),
        (kind and options.speed.compile, "speed.compile is not supported with pretrained.quantize"),
    )  # fmt: skip
    rewards = {**train.reward_fn, **options.test.reward_fn}
    names = [
        ("train.reward_fn_kwargs", train.reward_fn_kwargs, rewards),
        ("test.reward_fn_kwargs", options.test.reward_fn_kwargs, rewards),
        ("train.aggregate_fn_kwargs.reward_weights", train.aggregate_fn_kwargs.get("reward_weights") or (),
         [short_name(name) for name in train.reward_fn]),
    ]  # fmt: skip
    unknown = [
        f"{option} has {name!r}, which is not a reward of this run.{did_you_mean(name, known)}"
        for option, given, known in names
        for name in given
        if name not in known
    ]
    return [problem for applies, problem in rules if applies] + unknown


def check_sharding(options: RunOptions) -> None:
    """Refuse what cannot be combined with weights that accelerate or ``config.train.sharding`` shards."""
    raise_if_any(
        f"{option} cannot be combined with sharded weights (FSDP2)"
        for option, value in (("speed.compile", options.speed.compile), ("pretrained.quantize", options.pretrained.quantize))
        if value
    )


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


def check_model(options: RunOptions) -> None:
    """Refuse what the model cannot do; see ``check_run``."""
    model, sample, problems = options.pretrained.model, options.sample, []
    if not policy_class(model).has_true_cfg and sample.negative_prompt is not None:
        problems.append(
            f"sample.negative_prompt={sample.negative_prompt!r} is set, but the guidance of {model} is embedded, not true "
            "CFG: leave it at None"
        )
    if options.train.dgpo_reference == "guided":
        guides = getattr(policy_class(model), "would_guide", None)
        if options.train.loss_type != "dgpo" or not (guides and guides(sample.guidance_scale, sample.negative_prompt)):
            problems.append(
                "train.dgpo_reference='guided' needs train.loss_type='dgpo' and a model with true CFG, which "
                "sample.guidance_scale and sample.negative_prompt turn on"
            )
    multiple, fewest = size_multiple(model), fewest_steps(model)
    for group, steps in (("sample", sample.num_steps), ("test", options.test.num_steps)):
        if steps < fewest:
            problems.append(f"{group}.num_steps={steps} must be at least {fewest}: {model}'s schedule ends above σ = 0")
    for group in ("train", "test"):
        resolution = getattr(options, group).resolution
        if resolution % multiple:
            problems.append(f"{group}.resolution={resolution} is not a multiple of {multiple}, as {model} needs")
    raise_if_any(problems)
    if options.use_lora and options.train.lora_path is not None:
        find_lora(options.train.lora_path)


def require_promised_gpu(environment: Mapping[str, str]) -> None:
    """Refuse a machine with GPUs that torch does not see, usually because the driver is older than torch's CUDA.

    Raises:
        ConfigError: It is so, and ``ACCELERATE_USE_CPU`` is not true.
    """
    if torch.cuda.is_available() or environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True).stdout
        promise = "nvidia-smi lists GPUs" if "GPU " in listed else ""
    else:
        promise = f"CUDA_VISIBLE_DEVICES={visible}" if visible and visible != "-1" else ""
    if promise:
        raise ConfigError(
            f"{promise}, but torch {torch.__version__} sees none: update the driver or install a torch for it, or set "
            "ACCELERATE_USE_CPU=true to use the CPU"
        )


def check_device(options: RunOptions, device: torch.device) -> None:
    """Try the compiler and the attention kernel before weights are loaded.

    Raises:
        AccelerationError: One is missing, or does not work here.
    """
    if options.speed.compile:
        require_compiler()
    if options.speed.attention is not None:
        dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
        try_attention(options.speed.attention, device, dtype, policy_class(options.pretrained.model).masks_text)


def check_items(options: RunOptions, splits: Mapping[str, list[Item]]) -> None:
    """An editor needs items with reference images, any other generator items without; sizes must hold a token.

    Raises:
        DataError: It is otherwise.
    """
    model, policy = options.pretrained.model, policy_class(options.pretrained.model)
    for split, items in splits.items():
        where, problem = f"the {split} items", None
        fewest, most = (count(item.num_images for item in items) for count in (min, max))
        if policy.needs_image and not fewest:
            problem = f"edits images, but {where} have none: config.prompt_fn 'geneval_image' and 'arrow_editing' read images"
        elif most and not policy.edits_images:
            problem = f"generates from text alone, but {where} have reference images: use an editing model"
        elif most > 1 and not policy.several_images:
            problem = f"edits one image, but {where} have up to {most}: Qwen/Qwen-Image-Edit-2511 takes several"
        if problem:
            raise DataError(f"config.pretrained.model={model} {problem}")
        sized = [item for item in items if item.height is not None]
        if sized and options.item_size == "aspect":
            logger.info("%d of %s have a height and width: item_size='aspect' uses their shape only", len(sized), where)
        multiple = size_multiple(model) if sized and options.item_size == "exact" else 0
        for item in sized:
            if min(item.height, item.width) < multiple:
                raise DataError(
                    f"item {item.item_id} of {where} has the size {item.height}x{item.width}, but both sides need at least "
                    f"{multiple} pixels (config.item_size='exact')"
                )


def check_writable(folder: Path, needed_bytes: int = 0) -> None:
    """Refuse a folder that cannot be written to or lacks space.

    Raises:
        ConfigError: It names the folder and ``config.save_dir``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
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


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for lack of space or quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


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
    tokenizer = _tokenizer(model, policy.tokenizer_folder)
    lengths = [len(tokenizer(policy.in_template(tokenizer, prompt), verbose=False).input_ids) for prompt in prompts]
    longest = max(lengths, default=1)
    if length == 0:
        length = min(policy.text_limit, -(-longest // _TEXT_MULTIPLE) * _TEXT_MULTIPLE)
        logger.info(
            "max_sequence_length: %d text tokens for prompts of at most %d tokens (the model supports %d)",
            length, longest, policy.text_limit,
        )  # fmt: skip
    truncated = sum(tokens > length for tokens in lengths) if policy.cuts_text else 0
    if truncated:
        logger.warning(
            "%d of %d prompts are longer than config.max_sequence_length=%d tokens and will be truncated (the longest has %d)",
            truncated, len(lengths), length, longest,
        )  # fmt: skip
    return length


def _tokenizer(model: str, folder: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    # By its own path: as "subfolder", transformers asks for a config.json that tokenizers of pipelines do not have.
    path = local_folder(model, f"{folder}/*", option="config.pretrained.model") / folder
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise PolicyLoadError(
            f"cannot load the tokenizer in {model}/{folder} ({type(error).__name__}: {str(error)[:300]}). The folder may be "
            "incomplete: download or build it again."
        ) from error


# --- resuming -----------------------------------------------------------------------------------------------------------

# A checkpoint continues what these made; with other values its weights mean something else.
_BOUND = (
    "pretrained.model", "pretrained.image_positions", "use_lora", "train.loss_type", "train.lora_rank", "train.lora_alpha",
    "train.lora_targets", "train.lora_path", "train.reference",
)  # fmt: skip
_UNIMPORTANT = ("resume_from", "resume_changed", "run_name", "max_sequence_length")  # the last may be derived


def check_earlier_run(options: RunOptions, folder: Path) -> None:
    """Refuse a folder that holds a run, unless it is resumed; log every option that differs from the saved configuration,
    and refuse those of ``_BOUND``."""
    if not options.resume_from:
        if (folder / "metrics.jsonl").is_file():
            raise ConfigError(
                f"{folder} already holds a run; continue it with --config.resume_from=latest, or choose another "
                "--config.run_name"
            )
        return
    checkpoint = find_checkpoint(options.resume_from, folder)
    earlier = folder / "config.yaml" if checkpoint is None else checkpoint.parents[1] / "config.yaml"
    if not earlier.is_file():
        return
    described = dataclasses.replace(options.train, aggregate_fn=describe(options.train.aggregate_fn))
    saved = _flat(options_to_dict(load_options(str(earlier))))
    now = _flat(options_to_dict(dataclasses.replace(options, train=described)))
    changed = [name for name in now if name in saved and saved[name] != now[name] and name not in _UNIMPORTANT]
    for name in changed:
        logger.warning("resuming with another config.%s: %r -> %r", name, saved[name], now[name])
    bound = [f"config.{name} ({saved[name]!r} -> {now[name]!r})" for name in changed if name in _BOUND]
    if bound and not options.resume_changed:
        raise ConfigError(
            f"{earlier.parent} was trained with other values of {', '.join(bound)}. Resume with the earlier values, or set "
            "--config.resume_changed=True"
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"train.resolution": 512, …}`` of nested options; dicts of rewards and their arguments stay whole."""
    groups = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    flat = {name: value for name, value in values.items() if name not in groups}
    return flat | {f"{group}.{name}": value for group, each in groups.items() for name, value in each.items()}


def check_prompts(options: RunOptions, folder: Path, items: Sequence[Item]) -> str:
    """A hash of the training prompts; refuses to resume with others than the run's plan.json records."""
    digest = hashlib.sha256(json.dumps([item.prompt for item in items]).encode()).hexdigest()[:16]
    checkpoint = find_checkpoint(options.resume_from, folder) if options.resume_from else None
    earlier = checkpoint.parents[1] / "plan.json" if checkpoint else None
    saved = json.loads(earlier.read_text(encoding="utf-8")) if earlier and earlier.is_file() else {}
    if saved.get("prompts", digest) != digest and not options.resume_changed:
        raise ConfigError(
            f"config.dataset={options.dataset} holds other training prompts than {earlier.parent} was trained with. "
            "Resume with those, or set --config.resume_changed=True"
        )
    return digest
