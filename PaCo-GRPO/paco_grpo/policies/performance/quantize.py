"""The frozen base of a transformer in 8 or 4 bits under a float32 LoRA (QLoRA, arXiv 2305.14314), and temporary 8-bit copies.

bitsandbytes, because its layers keep the quantized weight for the backward pass, not a decoded copy as torchao's do.
Rollout and training use the same layers, so the first ratio stays 1.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paco_grpo.policies.base import Policy, unwrap

KINDS = ("nf4", "int8")

# Layers that see one vector per image instead of one per token: adaptive norms (FLUX's norm*.linear, Qwen-Image's img_mod
# and txt_mod). There is nothing to gain, and their errors would reach every token. Adapters are left out, too.
_NOT_FOR_TOKENS = re.compile(r"(^|\.)(norm\w*|\w+_mod|lora_\w+)(\.|$)")


def missing_library() -> str | None:
    """Why nothing can be quantized here, None if it can."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed: pip install 'paco-grpo[quantize]'"
    return None


def quantizable(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside the blocks of ``module`` (its lists of modules), by name.

    Embedders and the output projection are left out: they are small, and their errors would reach every token.
    """
    for list_name, blocks in module.named_children():
        if isinstance(blocks, nn.ModuleList):
            for name, layer in blocks.named_modules():
                if type(layer) is nn.Linear:
                    yield f"{list_name}.{name}", layer


def token_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The ``quantizable`` layers that see every token, by name."""
    return {name: layer for name, layer in quantizable(module) if not _NOT_FOR_TOKENS.search(name)}


def quantize(module: nn.Module, kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Replace every ``quantizable`` layer in place, moving one at a time to ``device``.

    Args:
        module: Frozen, in ``dtype``, without adapters; may still be on the CPU.
        kind: ``nf4`` (4.13 bits per weight with doubly quantized scales) or ``int8`` (row by row, activations too).
        dtype: Computing precision.
        device: Where the layers go; full-size layers are never there together.

    Raises:
        ValueError: Unknown ``kind``.
        ImportError: bitsandbytes is missing.
    """
    if kind not in KINDS:
        raise ValueError(f"pretrained.quantize = {kind!r} is unknown: choose one of {', '.join(KINDS)}")
    for name, layer in list(quantizable(module)):
        module.set_submodule(name, _quantized(layer, kind, dtype).to(device))
    # peft chooses its kind of LoRA layer by these.
    module.is_loaded_in_4bit, module.is_loaded_in_8bit = kind == "nf4", kind == "int8"


@contextmanager
def int8_copies(policy: Policy) -> Iterator[None]:
    """Inside the block the ``token_layers`` of the transformer compute in int8: weights row by row, activations token by
    token (LLM.int8 without outliers, arXiv 2208.07339).

    The layers are set aside and put back, so their weights stay the same objects with the same bits. The copies take a byte
    per weight and are made each time from the current weights (merged or not). The base must not be quantized already.
    """
    module = unwrap(policy.transformer)
    layers = token_layers(module)
    try:
        for name, layer in layers.items():
            module.set_submodule(name, _int8_copy(layer, policy.dtype))
        yield
    finally:
        for name, layer in layers.items():
            module.set_submodule(name, layer)


def is_quantized(layer: nn.Module) -> bool:
    """Whether the weight of ``layer`` is quantized."""
    return hasattr(layer, "quantized_kind")


def stored_bytes(layer: nn.Linear, kind: str) -> int:
    """Bytes of the quantized weight of ``layer`` with its scales, without the bias."""
    n = layer.weight.numel()
    if kind == "int8":
        return n + 4 * layer.out_features
    blocks = -(-n // 64)  # an 8-bit scale for 64 weights, and a float32 for 256 of those scales
    return -(-n // 2) + blocks + 4 * -(-blocks // 256)


def _int8_copy(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
    """An 8-bit copy on the device of ``layer``; bitsandbytes alone quantizes only what comes from the CPU."""
    import bitsandbytes as bnb

    made = _quantized(layer, "int8", dtype)
    numbers, scales, _ = bnb.functional.int8_vectorwise_quant(layer.weight.detach().to(torch.float16))
    made.weight = bnb.nn.Int8Params(numbers, requires_grad=False, has_fp16_weights=False, CB=numbers, SCB=scales)
    return made


def _quantized(layer: nn.Linear, kind: str, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    # int8 computes in float16 and logs that at every forward of every layer.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    has_bias = layer.bias is not None
    sizes = layer.in_features, layer.out_features, has_bias
    weight = layer.weight.detach()
    with torch.device("meta"):  # no second full-size weight
        if kind == "nf4":
            made = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
            made.support_avx512bf16_for_cpu = False  # it repacks the weights at the first forward without gradient
        else:
            # threshold 0: batch mates do not decide which columns are outliers, so samples stay independent
            made = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
    if kind == "nf4":
        made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    else:
        made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False) if has_bias else None
    made.quantized_kind = kind
    made.register_forward_pre_hook(_autocast_input)
    return made.eval()


def _autocast_input(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cast the input as autocast does for a linear layer: bitsandbytes computes in its input's precision."""
    x = inputs[0]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return (x, *inputs[1:])
