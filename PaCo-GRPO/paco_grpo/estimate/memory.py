"""Bytes of weights, and of what belongs to them, on one GPU."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paco_grpo.options import RunOptions
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.lora import lora_parameters

# Parameters of rewards that load a model on the device of the process.
_VIT_H = ("OpenCLIP ViT-H-14", 986_109_441)
REWARD_PARAMETERS = {
    "subfig_clipT": _VIT_H,
    "subfig_clipI": _VIT_H,
    "reference_clipI": _VIT_H,
    "pickscore": ("PickScore", _VIT_H[1]),
    "clipscore": ("CLIP ViT-L/14", 427_616_513),
}
# Bytes a weight in nf4: 4 bits, 8 bits for 64 weights, a float32 for 256 of these.
_NF4 = 1 / 2 + 1 / 64 + 1 / 4096


@dataclasses.dataclass
class Weights:
    """Bytes of a generator and its training state, by part."""

    resident: dict[str, int]  # stay on the device
    offloaded: dict[str, int]  # come only to compute
    gradients: int


def weights_of(policy: DiffusersPolicy, options: RunOptions, processes: int, saved: int) -> Weights:
    """What ``policy`` holds on each of ``processes`` GPUs.

    ``saved``: bytes by which quantization makes its transformer smaller.
    """
    speed = options.speed
    gradients = bytes_of([p for p in policy.transformer.parameters() if p.requires_grad])
    adapters = lora_parameters(policy).values()
    old_adapter = bytes_of([p for p in adapters if not p.requires_grad])
    resident = {
        "transformer": bytes_of(policy.transformer) - gradients - old_adapter - saved,
        "adapter" if options.use_lora else "trained weights": gradients,
        "old adapter": old_adapter,
        "optimizer": gradients // 2 if options.train.use_8bit_adam else 2 * gradients,
        "average": gradients if options.train.ema else 0,
    }
    if options.train.sharding == "fsdp2":
        sharded = ["transformer"] if options.use_lora else list(resident)
        for part in sharded:
            resident[part] //= processes
        if not options.use_lora:
            gradients //= processes
    offloaded = {}
    vae = offloaded if speed.offload_vae else resident
    vae["VAE"] = bytes_of(policy.pipeline.vae)
    # By default they stay only where half of the memory is free, and then they are not what fills
    # it.
    text = resident if speed.offload_text is False else offloaded
    text["text encoders"] = sum(map(bytes_of, policy.text_encoders()))
    resident = {part: size for part, size in resident.items() if size}
    return Weights(resident, offloaded, gradients)


def reward_bytes(options: RunOptions) -> dict[str, int]:
    """Bytes of local reward models on the device; rewards that use the same one share it."""
    sizes = {}
    arguments = options.test.reward_fn_kwargs | options.train.reward_fn_kwargs
    for name in options.train.reward_fn | options.test.reward_fn:
        kwargs = arguments.get(name, {})
        is_elsewhere = str(kwargs.get("device", "cuda")).startswith("cpu") or "server" in kwargs
        if name in REWARD_PARAMETERS and not is_elsewhere:
            model, parameters = REWARD_PARAMETERS[name]
            is_half = kwargs.get("dtype") in ("float16", "bfloat16")
            sizes[model] = (2 if is_half else 4) * parameters
    return sizes


def quantized(parts: Iterable[nn.Module], bits: int | None) -> tuple[int, int]:
    """Bytes that bitsandbytes saves in the linear layers of ``parts``.

    The second number is the bytes of the largest of these layers, decoded.
    """
    if not bits:
        return 0, 0
    stored = 1 if bits == 8 else _NF4
    saved = 0
    largest = 0
    for part in parts:
        for name, module in part.named_modules():
            is_quantized = "lora_" not in name and "lm_head" not in name
            if isinstance(module, nn.Linear) and is_quantized:
                weight = module.weight
                saved += int(weight.nbytes - weight.numel() * stored)
                largest = max(largest, weight.nbytes)
    return saved, largest


def add_gradients(module: nn.Module) -> None:
    """Give the trained parameters gradients, so that a backward pass does not count them."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a module, a list or a batch."""
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    map_tensors(count, value)
    return sum(sizes)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value``, a batch or a part of one, with ``function`` of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list):
        return [map_tensors(function, part) for part in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        parts = {name: map_tensors(function, getattr(value, name)) for name in names}
        return dataclasses.replace(value, **parts)
    return value
