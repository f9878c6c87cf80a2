"""The frozen base of a transformer in 8 or 4 bits (bitsandbytes), under a LoRA in float32: QLoRA (arXiv 2305.14314).

Also 8-bit copies of a whole base for a while, for the part of a rollout that may be approximate. bitsandbytes' layers keep the quantised weight for the backward pass and not a decoded copy, which is why it was chosen:
torchao's keep the copy. Rollout and training go through the same layers, so the first ratio stays 1.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

KINDS = ("nf4", "int8")

# Layers of a block that see one vector for an image, not one for a token (adaptive norms: FLUX's norm*.linear, Qwen-Image's
# img_mod and txt_mod): nothing to gain there, and their errors would reach every token. And the adapters.
_NOT_FOR_TOKENS = re.compile(r"(^|\.)(norm\w*|\w+_mod|lora_\w+)(\.|$)")


def missing_library() -> str | None:
    """Why nothing can be quantised here, None if it can."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed: pip install 'paco-grpo[quantize]'"
    return None


def quantizable(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside the blocks of ``module`` (its lists of modules), by name.

    Embedders and the output projection stay as they are: they are small, and their errors would reach every token.
    """
    for list_name, blocks in module.named_children():
        if isinstance(blocks, nn.ModuleList):
            for name, layer in blocks.named_modules():
                if type(layer) is nn.Linear:
                    yield f"{list_name}.{name}", layer


def quantize(module: nn.Module, kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Replace every layer of :func:`quantizable`, in place, moving one at a time to ``device``.

    Args:
        module: Frozen, in ``dtype``, without adapters; may still be on the CPU.
        kind: ``nf4`` (4.13 bits a weight with doubly quantised scales) or ``int8`` (row by row, activations too).
        dtype: In which is computed.
        device: Where the layers go; full-size layers are never there together.

    Raises:
        ValueError: Unknown ``kind``.
        ImportError: Without bitsandbytes.
    """
    if kind not in KINDS:
        raise ValueError(f"pretrained.quantize = {kind!r} is unknown: choose one of {', '.join(KINDS)}")
    for name, layer in list(quantizable(module)):
        _replace(module, name, _layer(layer, kind, dtype).to(device))
    # What peft looks at to put its own kind of LoRA on the layers.
    module.is_loaded_in_4bit, module.is_loaded_in_8bit = kind == "nf4", kind == "int8"


def token_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Those of :func:`quantizable` that see every token, by name; adapters are none of them."""
    return {name: layer for name, layer in quantizable(module) if not _NOT_FOR_TOKENS.search(name)}


@contextmanager
def in_int8(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block the :func:`token_layers` compute in int8: weights row by row, activations token by
    token (LLM.int8 without outliers, arXiv 2208.07339).

    The layers themselves are set aside and put back, so their weights stay the same objects with the same bits. The copies
    take a byte a weight and are made anew each time, of the weights as they are then (merged or not).

    Args:
        module: The transformer, adapters allowed; its base must be whole.
        dtype: In which is computed.
    """
    layers = token_layers(module)
    try:
        for name, layer in layers.items():
            _replace(module, name, _in_int8_here(layer, dtype))
        yield
    finally:
        for name, layer in layers.items():
            _replace(module, name, layer)


def _in_int8_here(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
    """An 8-bit copy where ``layer`` is; by itself bitsandbytes quantises only what comes from the CPU."""
    import bitsandbytes as bnb

    made = _layer(layer, "int8", dtype)
    numbers, scales, _ = bnb.functional.int8_vectorwise_quant(layer.weight.detach().to(torch.float16))
    made.weight = bnb.nn.Int8Params(numbers, requires_grad=False, has_fp16_weights=False, CB=numbers, SCB=scales)
    return made


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(module.get_submodule(parent), own, layer)


def is_quantized(layer: nn.Module) -> bool:
    """Whether the weight of ``layer`` is stored in fewer bits."""
    return hasattr(layer, "quantized_kind")


def stored_bytes(layer: nn.Linear, kind: str) -> int:
    """Bytes of the quantised weight of ``layer`` with its scales (bias apart)."""
    n = layer.weight.numel()
    if kind == "int8":
        return n + 4 * layer.out_features
    blocks = -(-n // 64)  # a scale in 8 bits for 64 weights, and one in float32 for 256 of those
    return -(-n // 2) + blocks + 4 * -(-blocks // 256)


def _layer(layer: nn.Linear, kind: str, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    # int8 computes in float16 and says so at every forward of every layer.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    has_bias = layer.bias is not None
    sizes = layer.in_features, layer.out_features, has_bias
    weight = layer.weight.detach()
    with torch.device("meta"):  # no second full-size weight
        if kind == "nf4":
            made = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
            made.support_avx512bf16_for_cpu = False  # it repacks the weights at the first forward without gradient
        else:
            # threshold 0: no columns are singled out by their batch mates, so a sample's numbers are its own
            made = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
    if kind == "nf4":
        made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=made)
    else:
        made.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    made.bias = nn.Parameter(layer.bias.detach(), requires_grad=False) if has_bias else None
    made.quantized_kind = kind
    made.register_forward_pre_hook(_as_autocast)
    return made.eval()


def _as_autocast(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Inputs as autocast would give them to a linear layer: bitsandbytes answers in its input's precision."""
    x = inputs[0]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return (x, *inputs[1:])
