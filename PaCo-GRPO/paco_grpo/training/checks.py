"""Every check of a configuration that concerns more than one option, in one place; run before any model is loaded."""

from __future__ import annotations

import difflib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from ml_collections import ConfigDict

from paco_grpo.data.prompts import KINDS, DataError
from paco_grpo.objectives import OBJECTIVES
from paco_grpo.policies import fewest_steps, policy_class, quantized, size_multiple, transformer_bytes
from paco_grpo.policies.adapters import find_lora
from paco_grpo.rewards.registry import find_factory, reward_weights
from paco_grpo.training.configuration import ConfigError
from paco_grpo.training.plan import gradient_steps
from paco_grpo.training.tracking import TRACKERS
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_CHOICES: dict[str, Iterable] = {
    "prompt_fn": KINDS,
    "pretrained.quantize": (None, *quantized.KINDS),
    "item_size": ("exact", "aspect"),
    "mixed_precision": ("bf16", "no"),
    "logging_platform": TRACKERS,
    "sample.tail_order": (1, 2),
    "sample.tail_weights": (None, "int8"),
    "train.loss_type": OBJECTIVES,
    "train.old_log_prob": ("auto", "rollout", "recompute"),
    "train.sharding": (None, "fsdp2"),
}
_AT_LEAST: dict[str, float] = {
    "seed": 0,
    "save_freq": 0,
    "eval_freq": 0,
    "num_checkpoint_limit": 1,
    "num_epochs": 0,
    "max_train_minutes": 0,
    "max_sequence_length": 0,
    "num_threads": 1,
    "sample.num_steps": 1,
    "sample.num_noise_steps": 1,
    "sample.noise_level": 0,
    "sample.guidance_scale": 0,
    "sample.batch_size": 0,
    "sample.num_images_per_prompt": 1,
    "sample.unique_sample_num_per_epoch": 1,
    "sample.reward_batch_size": 1,
    "sample.tail_steps": 1,
    "sample.tail_cache": 0,
    "train.resolution": 1,
    "train.batch_size": 1,
    "train.learning_rate": 0,
    "train.lr_warmup_steps": 0,
    "train.adam_weight_decay": 0,
    "train.num_inner_epochs": 1,
    "train.gradient_step_per_epoch": 1,
    "train.clip_range": 0,
    "train.beta": 0,
    "train.ema_update_interval": 1,
    "train.lora_rank": 1,
    "test.resolution": 1,
    "test.batch_size": 1,
    "test.num_steps": 1,
    "test.num_images": 1,
    "test.seed": 0,
    "health.probe_images": 0,
    "health.max_velocity_change": 0,
    "health.max_contrast_change": 1,
    "health.max_detail_change": 1,
    "health.max_brightness_change": 0,
    "health.min_distinctness": 0,
    "health.max_gradient_spike": 1,
    "health.max_clip_share": 0,
    "health.max_zero_std_share": 0,
    "health.max_reward_divergence": 0,
}
_LARGE = 4e9  # bytes of a transformer, for a CPU
_BELOW_ONE = ("train.adam_beta1", "train.adam_beta2", "train.ema_decay")
_POSITIVE = ("train.adv_clip_max", "train.nft_beta", "train.lora_alpha", "train.adam_epsilon", "train.max_grad_norm")


def check_config(config: ConfigDict) -> None:
    """Refuse a configuration that contradicts itself or names what does not exist.

    Raises:
        ConfigError: All problems found, one line each; every line names the field to change.
    """
    problems: list[str] = []
    for rule in (_choices, _ranges, _sampling, _tail, _speed, _training, _quantized, _data):
        problems.extend(rule(config))
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(f"config.{problem}" for problem in problems))


def _get(config: ConfigDict, key: str):
    for part in key.split("."):
        config = config[part]
    return config


def _choices(config: ConfigDict) -> Iterator[str]:
    for key, known in _CHOICES.items():
        value = _get(config, key)
        if value not in known:
            near = difflib.get_close_matches(str(value), [str(choice) for choice in known if choice], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            yield f"{key}={value!r} is not known.{hint} Known: {', '.join(map(str, known))}"


def _ranges(config: ConfigDict) -> Iterator[str]:
    for key, least in _AT_LEAST.items():
        value = _get(config, key)
        if value is not None and (not math.isfinite(value) or value < least):
            yield f"{key}={value} must be at least {least:g}"
    for key in _BELOW_ONE:
        if not 0 <= _get(config, key) < 1:
            yield f"{key}={_get(config, key)} must lie in [0, 1)"
    for key in _POSITIVE:
        if not 0 < _get(config, key) < math.inf:
            yield f"{key}={_get(config, key)} must be greater than 0"
    if not 0 <= config.train.max_missing_reward_fraction <= 1:
        yield f"train.max_missing_reward_fraction={config.train.max_missing_reward_fraction} must lie in [0, 1]"


def _sampling(config: ConfigDict) -> Iterator[str]:
    sample, train = config.sample, config.train
    if not sample.noise_steps and train.loss_type != "nft":
        yield f"sample.noise_steps is empty, but train.loss_type={train.loss_type!r} trains on noise steps"
    if not sample.noise_steps and train.loss_type == "nft" and train.timesteps is None:
        yield "train.timesteps is not given and sample.noise_steps is empty: give one of them, or there is no step to train on"
    for step in sample.noise_steps:
        if not 0 <= step < sample.num_steps:
            yield f"sample.noise_steps has step {step}, but sample.num_steps={sample.num_steps}: steps are 0 to " + str(
                sample.num_steps - 1
            )
    if len(set(sample.noise_steps)) != len(sample.noise_steps):
        yield f"sample.noise_steps={tuple(sample.noise_steps)} names a step twice"
    if sample.num_noise_steps is not None and sample.num_noise_steps > len(sample.noise_steps):
        yield f"sample.num_noise_steps={sample.num_noise_steps} is more than sample.noise_steps has"
    if sample.noise_level == 0 and train.loss_type != "nft":
        yield f"sample.noise_level=0 leaves nothing to train on with train.loss_type={train.loss_type!r}"
    yield from _timesteps(config)
    if sample.cps and train.loss_type == "guard_grpo":
        yield "sample.cps=True cannot be used with train.loss_type='guard_grpo': its correction is Flow-SDE's"


def _timesteps(config: ConfigDict) -> Iterator[str]:
    sample, train = config.sample, config.train
    if train.timesteps is None:
        return
    if not train.timesteps:
        yield "train.timesteps is empty; None trains on every noise step"
    for step in train.timesteps:
        if train.loss_type == "nft" and not 0 <= step < sample.num_steps:
            yield f"train.timesteps has step {step}, but sample.num_steps={sample.num_steps}"
        if train.loss_type != "nft" and step not in sample.noise_steps:
            yield f"train.timesteps has step {step}, which is not among sample.noise_steps"
    if train.loss_type != "nft" and sample.num_noise_steps is not None:
        yield "train.timesteps cannot be given together with sample.num_noise_steps: trained steps are those drawn"


def _tail(config: ConfigDict) -> Iterator[str]:
    sample = config.sample
    for name, default in (("tail_steps", None), ("tail_order", 1), ("tail_cache", 0.0), ("tail_weights", None)):
        if sample[name] != default and not (sample.noise_steps and sample.noise_level):
            yield f"sample.{name}={sample[name]} changes the steps after the last noise step, but sampling has no noise"
    if sample.tail_cache and config.speed.compile:
        yield "sample.tail_cache cannot be used with speed.compile=True: it decides at each forward which blocks to skip"
    if sample.tail_weights == "int8":
        yield from _int8_tail(config)


def _int8_tail(config: ConfigDict) -> Iterator[str]:
    if problem := quantized.missing_library():
        yield f"sample.tail_weights='int8': {problem}"
    if config.pretrained.quantize is not None:
        yield "sample.tail_weights='int8' needs a whole base: leave it or pretrained.quantize out"
    if config.speed.compile:
        yield "sample.tail_weights='int8' cannot be used with speed.compile=True: it replaces layers of compiled blocks"


def _speed(config: ConfigDict) -> Iterator[str]:
    if config.speed.attention is not None:
        from paco_grpo.policies.acceleration import attention_problem

        if problem := attention_problem(config.speed.attention):
            yield f"speed.attention={problem}"
    if config.speed.fused_adam and config.train.use_8bit_adam:
        yield "speed.fused_adam=True cannot be used with train.use_8bit_adam=True, which has its own kernels"


def _training(config: ConfigDict) -> Iterator[str]:
    train, sample = config.train, config.sample
    images = sample.unique_sample_num_per_epoch * sample.num_images_per_prompt
    if gradient_steps(config) > images:
        yield f"train.gradient_step_per_epoch={gradient_steps(config)} is more than the {images} images of an epoch"
    if train.decay_type is not None and train.decay_type not in (0, 1, 2):
        yield f"train.decay_type={train.decay_type} must be 0, 1 or 2"
    if train.decay_type and train.loss_type != "nft":
        yield f"train.decay_type={train.decay_type} needs train.loss_type='nft': {train.loss_type} has no old adapter"
    if not config.use_lora:
        if train.loss_type == "nft":
            yield "use_lora=False cannot be used with train.loss_type='nft': the old policy is an adapter"
        if train.beta > 0:
            yield "use_lora=False cannot be used with train.beta > 0: the reference policy is 'adapters off'"
        if train.lora_path is not None:
            yield "train.lora_path is given, but use_lora=False"


def _quantized(config: ConfigDict) -> Iterator[str]:
    kind = config.pretrained.quantize
    if kind not in quantized.KINDS:
        return
    if problem := quantized.missing_library():
        yield f"pretrained.quantize={kind!r}: {problem}"
    if not config.use_lora:
        yield f"pretrained.quantize={kind!r} needs use_lora=True: a weight in few bits cannot be trained"
    if config.sample.merge_lora:
        yield f"sample.merge_lora=True cannot be used with pretrained.quantize={kind!r}: it would be rounded to its bits"
    if config.train.sharding is not None:
        yield f"train.sharding={config.train.sharding!r} cannot be used with pretrained.quantize={kind!r}"
    if config.speed.compile:
        yield f"speed.compile=True was not tried with pretrained.quantize={kind!r}"


def _data(config: ConfigDict) -> Iterator[str]:
    if not config.dataset:
        yield "dataset is empty; give the folder of the prompt set"
    if not config.train.reward_fn:
        yield "train.reward_fn is empty; give one, e.g. --config.train.reward_fn.jpeg_compressibility=1"
    for group in ("train", "test"):
        table = config[group].reward_fn
        for name, weight in table.items():
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
                yield f"{group}.reward_fn.{name}={weight!r} is not a weight"
        yield from _said(lambda t=table: reward_weights({name: 1.0 for name in t}), f"{group}.reward_fn: ")
        for name in table:
            yield from _said(lambda n=name: find_factory(n), f"{group}.reward_fn: ")
    known = set(config.train.reward_fn) | set(config.test.reward_fn)
    for group in ("train", "test"):
        for name in config[group].reward_fn_kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                yield f"{group}.reward_fn_kwargs has {name!r}, which is no reward of this run.{hint}"
    weights = config.train.aggregate_fn_kwargs.get("reward_weights")
    if weights is not None:
        short = {name.rsplit(":", 1)[-1] for name in config.train.reward_fn}
        for name in weights:
            if name not in short:
                yield f"train.aggregate_fn_kwargs.reward_weights has {name!r}, which is not in train.reward_fn"


def _said(action: Callable[[], object], prefix: str) -> Iterator[str]:
    try:
        action()
    except RuntimeError as error:
        yield prefix + str(error)


def check_model(config: ConfigDict) -> None:
    """Refuse what the model cannot do. Only its small configuration files are read, or fetched from the hub.

    Raises:
        ConfigError: All problems found, one line each; every line names the field to change.
        PolicyLoadError: There is no such model or LoRA, or it is not reached.
    """
    model, sample = config.pretrained.model, config.sample
    problems = []
    if not policy_class(model).has_true_cfg and sample.negative_prompt is not None:
        problems.append(
            f"sample.negative_prompt={sample.negative_prompt!r} is given, but the guidance of {model} is embedded, not "
            "true CFG: leave it at None"
        )
    multiple, fewest = size_multiple(model), fewest_steps(model)
    for name, steps in (("sample.num_steps", sample.num_steps), ("test.num_steps", config.test.num_steps)):
        if steps < fewest:
            problems.append(f"{name}={steps} must be at least {fewest}: the schedule of {model} ends at a σ of its own")
    for group in ("train", "test"):
        if config[group].resolution % multiple:
            problems.append(
                f"{group}.resolution={config[group].resolution} is not a multiple of {multiple}, as {model} needs"
            )
    _refuse(problems)
    if config.use_lora and config.train.lora_path is not None:
        find_lora(config.train.lora_path)


def warn_of_a_slow_device(config: ConfigDict, device: torch.device) -> None:
    """A published generator on a CPU is nearly always an accident: a GPU that is hidden, or torch without CUDA."""
    stored = transformer_bytes(config.pretrained.model) if device.type == "cpu" else 0
    if stored > _LARGE:
        logger.warning(
            "config.pretrained.model=%s has %.0f GB of transformer weights, and no GPU is visible to torch %s: a step will "
            "take minutes, if the memory is enough at all", config.pretrained.model, stored / 1e9, torch.__version__,
        )  # fmt: skip


def check_images(config: ConfigDict, splits: Mapping[str, list[Item]]) -> None:
    """An editor needs items with reference images, another generator none; known before weights are read.

    Raises:
        DataError: It is otherwise.
    """
    edits_images = policy_class(config.pretrained.model).edits_images
    for split, items in splits.items():
        has_images = items[0].image is not None  # a kind of prompt set has them everywhere or nowhere
        if edits_images and not has_images:
            raise DataError(
                f"config.pretrained.model={config.pretrained.model} edits images, but the {split} items of "
                f"config.dataset={config.dataset} have none: config.prompt_fn={config.prompt_fn!r} reads text alone, use "
                "'geneval_image' or 'arrow_editing'"
            )
        if has_images and not edits_images:
            raise DataError(
                f"config.pretrained.model={config.pretrained.model} draws from text alone, but the {split} items of "
                f"config.dataset={config.dataset} have reference images (config.prompt_fn={config.prompt_fn!r}): use "
                "config.prompt_fn=geneval, or an editing model"
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
