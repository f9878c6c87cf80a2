"""Checks of options that need no knowledge of models, objectives, rewards or installed libraries."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping

from paco_grpo.options.schema import OPTIONS, Option, RunOptions
from paco_grpo.suggest import did_you_mean


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the option and what to do."""


def refuse(problems: Iterable[str]) -> None:
    """Raise a ``ConfigError`` with a line for each of ``problems``, which begin with the option's name."""
    lines = [f"config.{problem}" for problem in problems]
    if lines:
        raise ConfigError("\n".join(lines))


def find_problems(options: RunOptions) -> list[str]:
    """Options that are out of range or contradict each other: a line for each, beginning with the option's name."""
    problems = [
        p for declared in OPTIONS.values() for p in _range(declared, operator.attrgetter(declared.name)(options))
    ]
    for rule in (_noise, _tail, _training, _rewards):
        problems.extend(rule(options))
    return problems


def user_code(options: RunOptions) -> Iterator[tuple[str, object]]:
    """(option, what it names) for every option that names code by its place: ``package.module:name``, ``file.py:name``."""
    for group in ("train", "test"):
        part = getattr(options, group)
        yield from ((f"{group}.reward_fn", name) for name in part.reward_fn if ":" in str(name))
        for name, kwargs in part.reward_fn_kwargs.items():
            if isinstance(kwargs, Mapping) and ":" in str(kwargs.get("reader")):  # the reward ocr imports it
                yield f"{group}.reward_fn_kwargs.{name}.reader", kwargs["reader"]
    function = options.train.aggregate_fn
    if callable(function) or ":" in str(function.get("name") if isinstance(function, Mapping) else function):
        yield "train.aggregate_fn", function
    if ":" in options.train.loss_type:
        yield "train.loss_type", options.train.loss_type


def _range(declared: Option, value) -> Iterator[str]:
    shown = f"{declared.name}={value!r}"
    if declared.choices and value not in declared.choices:
        choices = list(map(str, declared.choices))
        yield f"{shown} is not known.{did_you_mean(str(value), choices)} Known: {', '.join(choices)}"
    if value is None or declared.kind not in (int, float):
        return
    if not math.isfinite(value):
        yield f"{shown} must be a finite number"
        return
    for limit, words, holds in (
        (declared.at_least, "at least", operator.ge),
        (declared.at_most, "at most", operator.le),
        (declared.above, "greater than", operator.gt),
        (declared.below, "less than", operator.lt),
    ):
        if limit is not None and not holds(value, limit):
            yield f"{shown} must be {words} {limit:g}"


def _noise(options: RunOptions) -> Iterator[str]:
    sample = options.sample
    for step in sample.noise_steps:
        if not 0 <= step < sample.num_steps:
            yield (
                f"sample.noise_steps has step {step}, but sample.num_steps={sample.num_steps}: steps are 0 to "
                f"{sample.num_steps - 1}"
            )
    if len(set(sample.noise_steps)) != len(sample.noise_steps):
        yield f"sample.noise_steps={sample.noise_steps} names a step twice"
    if sample.num_noise_steps is not None and sample.num_noise_steps > len(sample.noise_steps):
        yield f"sample.num_noise_steps={sample.num_noise_steps} is more than sample.noise_steps has"
    if options.train.timesteps == ():
        yield "train.timesteps is empty; None trains on every noise step"


def _tail(options: RunOptions) -> Iterator[str]:
    sample = options.sample
    for name in ("tail_steps", "tail_order", "tail_cache", "tail_weights"):
        value = getattr(sample, name)
        if value != OPTIONS[f"sample.{name}"].default and not (sample.noise_steps and sample.noise_level):
            yield f"sample.{name}={value!r} changes the steps after the last noise step, but sampling has no noise"
    if sample.tail_cache and options.speed.compile:
        yield "sample.tail_cache cannot be used with speed.compile=True: each forward decides which blocks to skip"
    if sample.tail_weights == "int8":
        if options.pretrained.quantize is not None:
            yield "sample.tail_weights='int8' needs an unquantized base: use it or pretrained.quantize, not both"
        if options.speed.compile:
            yield "sample.tail_weights='int8' cannot be used with speed.compile=True: it replaces compiled layers"


def _training(options: RunOptions) -> Iterator[str]:
    train, kind = options.train, options.pretrained.quantize
    if options.speed.fused_adam and train.use_8bit_adam:
        yield "speed.fused_adam=True cannot be used with train.use_8bit_adam=True, which has its own kernels"
    if not options.use_lora and train.beta > 0:
        yield "use_lora=False cannot be used with train.beta > 0: the reference is the model without its adapter"
    if not options.use_lora and train.lora_path is not None:
        yield "train.lora_path needs use_lora=True"
    if kind is None:
        return
    if not options.use_lora:
        yield f"pretrained.quantize={kind!r} needs use_lora=True: quantized weights cannot be trained"
    if options.sample.merge_lora:
        yield f"sample.merge_lora=True cannot be used with pretrained.quantize={kind!r}: the LoRA would be rounded away"
    if train.sharding is not None:
        yield f"train.sharding={train.sharding!r} cannot be used with pretrained.quantize={kind!r}"
    if options.speed.compile:
        yield f"speed.compile=True is not supported with pretrained.quantize={kind!r}"


def _rewards(options: RunOptions) -> Iterator[str]:
    if not options.dataset:
        yield "dataset is empty; give the folder of the prompt set"
    if not options.train.reward_fn:
        yield "train.reward_fn is empty; give a reward, e.g. --config.train.reward_fn.jpeg_compressibility=1"
    known = {**options.train.reward_fn, **options.test.reward_fn}
    for group in ("train", "test"):
        for name, weight in getattr(options, group).reward_fn.items():
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
                yield f"{group}.reward_fn.{name}={weight!r} is not a finite number"
        for name in getattr(options, group).reward_fn_kwargs:
            if name not in known:
                hint = did_you_mean(name, known)
                yield f"{group}.reward_fn_kwargs has {name!r}, which is not a reward of this run.{hint}"
    short_names = [name.rsplit(":", 1)[-1] for name in options.train.reward_fn]
    for name in options.train.aggregate_fn_kwargs.get("reward_weights") or ():
        if name not in short_names:
            yield (
                f"train.aggregate_fn_kwargs.reward_weights has {name!r}, which is not in train.reward_fn."
                f"{did_you_mean(name, short_names)}"
            )
