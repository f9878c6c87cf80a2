"""The frozen base of a transformer in 8 or 4 bits under a float32 LoRA (QLoRA, arXiv 2305.14314), with bitsandbytes' layers.

Not through diffusers' ``BitsAndBytesConfig``: it refuses machines without a GPU, and it skips layers by the last part of
their name, so that leaving out the transformer's ``proj_out`` leaves out those of all blocks (2.7 GB of FLUX.1-dev).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import torch
from torch import nn


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


def quantize(module: nn.Module, kind: str, dtype: torch.dtype, device: torch.device | str) -> None:
    """Replace every ``quantizable`` layer in place, moving one at a time to ``device``.

    Args:
        module: Frozen, in ``dtype``, without adapters; may still be on the CPU.
        kind: ``nf4`` (4.13 bits per weight with doubly quantized scales) or ``int8`` (row by row, activations too).
        dtype: Computing precision.
        device: Where the layers go; full-size layers are never there together.
    """
    # int8 computes in float16 and logs that at every forward of every layer.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for name, layer in list(quantizable(module)):
        module.set_submodule(name, _quantized(layer, kind, dtype).to(device))
    # peft chooses its kind of LoRA layer by these.
    module.is_loaded_in_4bit, module.is_loaded_in_8bit = kind == "nf4", kind == "int8"


def _quantized(layer: nn.Linear, kind: str, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    sizes = layer.in_features, layer.out_features, layer.bias is not None
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
    made.bias = layer.bias
    made.register_forward_pre_hook(_autocast_input)
    return made.eval()


def _autocast_input(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cast the input as autocast does for a linear layer: bitsandbytes computes in its input's precision."""
    x = inputs[0]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return (x, *inputs[1:])
