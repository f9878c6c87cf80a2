"""The LoRA of a policy's transformer: switched inside a block, copied as a snapshot.

``adapters`` attaches, reads and saves it.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor

from paco_grpo.policies.base import Policy

TRAINED = "default"  # name of the trained adapter; snapshots have other names
START = "start"  # a frozen copy of the adapter that training started from
SAVED = "saved"  # the adapter of a file, which is compared with the trained one
NO_ADAPTER = None  # in place of a name: the base weights


def reference_weights(policy: Policy) -> AbstractContextManager[None]:
    """The reference inside the block: base weights, or ``lora_path``'s adapter as ``START``.

    ``START`` is there with ``train.reference='start'``. For forwards without gradient.
    """
    has_start = START in getattr(policy.transformer, "peft_config", {})
    return using_adapter(policy, START if has_start else NO_ADAPTER)


@contextmanager
def using_adapter(policy: Policy, name: str | None) -> Iterator[None]:
    """The adapter ``name``, or ``NO_ADAPTER``, instead of the trained one inside the block.

    For forwards without gradient.
    """
    layers = lora_layers(policy)
    active = [list(layer.active_adapters) for layer in layers]
    flags = []
    for layer in layers:
        flags += [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
    try:
        for layer in layers:
            if name is NO_ADAPTER:
                layer.enable_adapters(False)
            else:
                layer.set_adapter(name)
        yield
    finally:  # peft's switches change both
        for layer, names in zip(layers, active, strict=True):
            layer.enable_adapters(True)
            layer.set_adapter(names)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def merged(policy: Policy) -> Iterator[None]:
    """The active LoRA is part of the base weights inside the block: cheaper forwards.

    For forwards without gradient. They differ by rounding, in the base's precision. Afterwards the
    base weights have exactly the same bits: they are set aside, which takes memory for one more
    copy of the layers that have a LoRA.
    """
    layers = []
    for layer in lora_layers(policy):
        # Weights that are sharded over processes stay as they are.
        if not isinstance(layer.get_base_layer().weight, DTensor):
            layers.append(layer)
    saved = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    try:
        # The product of A and B is computed in their own precision.
        with torch.autocast(policy.device.type, enabled=False):
            for layer in layers:
                layer.merge(adapter_names=list(layer.active_adapters))
        yield
    finally:
        for layer, before in zip(layers, saved, strict=True):
            layer.merged_adapters.clear()
            layer.get_base_layer().weight.detach().copy_(before)


def add_snapshot(policy: Policy, name: str) -> None:
    """Add a frozen copy of the trained LoRA as adapter ``name``."""
    with frozen_beside_trained(policy, name):
        config = copy.deepcopy(policy.transformer.peft_config[TRAINED])
        policy.transformer.add_adapter(config, name)
    blend_snapshot(policy, name, decay=0.0)


@contextmanager
def frozen_beside_trained(policy: Policy, name: str) -> Iterator[None]:
    """The adapter ``name``, which the block adds, is frozen, and the trained one active, after it."""
    with warnings.catch_warnings():
        # Several adapters are intended.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        yield
    policy.transformer.set_adapter(TRAINED)
    set_trainable(policy, name, False)
    set_trainable(policy, TRAINED, True)


@torch.no_grad()
def blend_snapshot(policy: Policy, name: str, decay: float) -> None:
    """copy ← decay·copy + (1 − decay)·trained, in place; ``decay`` in [0, 1]."""
    copies = lora_parameters(policy, name).values()
    originals = lora_parameters(policy, TRAINED).values()
    for copied, trained in zip(copies, originals, strict=True):
        copied.lerp_(trained.to(copied.dtype), 1.0 - decay)


def lora_parameters(policy: Policy, name: str = "") -> dict[str, nn.Parameter]:
    """The parameters of the adapter ``name``, or of all adapters, trainable or not."""
    adapter = f"{name}." if name else ""
    a = f".lora_A.{adapter}"
    b = f".lora_B.{adapter}"
    named = policy.transformer.named_parameters()
    return {key: parameter for key, parameter in named if a in key or b in key}


def set_trainable(policy: Policy, name: str, trainable: bool) -> None:
    """Make the parameters of the adapter ``name`` float32, with or without gradient."""
    for parameter in lora_parameters(policy, name).values():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(trainable)


def lora_layers(policy: Policy) -> list[BaseTunerLayer]:
    """The layers that have a LoRA."""
    modules = policy.transformer.modules()
    layers = [module for module in modules if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ValueError(
            "the transformer has no LoRA, which a reference or snapshot needs: set "
            "config.use_lora=True, or use a loss without them"
        )
    return layers
