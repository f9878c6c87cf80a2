"""``config.speed`` applied to a run: what can be refused before weights are loaded, and what is set on the policy."""

from __future__ import annotations

import logging

import torch
from ml_collections import ConfigDict

from paco_grpo.policies import Policy, policy_class
from paco_grpo.policies.acceleration import (
    AccelerationError,
    compile_blocks,
    require_compiler,
    set_attention,
    try_attention,
)
from paco_grpo.sampling.tail import Tail
from paco_grpo.training.configuration import ConfigError

logger = logging.getLogger(__name__)


def on_cuda(chosen: bool | None, device: torch.device) -> bool:
    """An option of which None means: where the device is CUDA."""
    return device.type == "cuda" if chosen is None else chosen


def tail_of(config: ConfigDict) -> Tail:
    """The rollout's end as ``config.sample`` has it."""
    sample = config.sample
    return Tail(sample.tail_steps, sample.tail_order, sample.tail_cache, sample.tail_weights)


def check_speed(config: ConfigDict, device: torch.device) -> None:
    """Try on ``device`` what a run would otherwise find missing after its weights are loaded.

    Raises:
        ConfigError: A compiler or an attention kernel is missing, or does not work here.
    """
    try:
        if config.speed.compile:
            require_compiler()
    except AccelerationError as error:
        raise ConfigError(f"config.speed.compile=True: {error}. Install one, or set it to False") from error
    name = config.speed.attention
    if name is None:
        return
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    try:
        try_attention(name, device, dtype, policy_class(config.pretrained.model).masks_text)
    except AccelerationError as error:
        raise ConfigError(f"config.speed.attention: {error}. None takes diffusers' default") from error


def apply_speed(config: ConfigDict, policy: Policy) -> None:
    """Set back end, compilation and offloading on ``policy``, which has its adapters and its place.

    Raises:
        ConfigError: Its transformer cannot be compiled block by block.
    """
    speed, device = config.speed, policy.device
    if speed.attention is not None:
        set_attention(policy, speed.attention)
    if speed.compile:
        try:
            compile_blocks(policy)
        except AccelerationError as error:
            raise ConfigError(f"config.speed.compile=True: {error}; set it to False") from error
        logger.info("transformer blocks will be compiled at their first forward of each kind, which takes minutes")
    policy.offload(text_encoders=on_cuda(speed.offload_text_encoders, device), vae=speed.offload_vae)
