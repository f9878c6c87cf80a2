"""The frozen base of a transformer in 4 bits under a float32 LoRA (QLoRA, arXiv 2305.14314), with bitsandbytes' layers.

Not through diffusers' ``BitsAndBytesConfig``: it refuses machines without a GPU, and to leave out the transformer's
``proj_out`` it leaves out those of all blocks (2.7 GB of FLUX.1-dev).
"""

from collections.abc import Iterator

import torch
from torch import nn


def quantizable(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside the blocks of ``module``, by name.

    Embedders and the output projection are small, and their errors would reach every token.
    """
    for list_name, blocks in module.named_children():
        if isinstance(blocks, nn.ModuleList):
            for name, layer in blocks.named_modules():
                if type(layer) is nn.Linear:
                    yield f"{list_name}.{name}", layer


def quantize(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Replace every ``quantizable`` layer in place by one in nf4 (4.13 bits a weight), moving one at a time to ``device``.

    ``module`` is frozen, in ``dtype`` (the computing precision) and without adapters; it may still be on the CPU.
    """
    for name, layer in list(quantizable(module)):
        module.set_submodule(name, _quantized(layer, dtype).to(device))
    module.is_loaded_in_4bit = True  # peft chooses its kind of LoRA layer by it


def _quantized(layer: nn.Linear, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    with torch.device("meta"):  # no second full-size weight
        made = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            layer.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
        )
    made.support_avx512bf16_for_cpu = (
        False  # it repacks the weights at the first forward without gradient
    )
    made.weight = bnb.nn.Params4bit(
        layer.weight.detach(), requires_grad=False, quant_type="nf4", module=made
    )
    made.bias = layer.bias
    made.register_forward_pre_hook(_autocast_input)
    return made.eval()


def _autocast_input(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As autocast casts for a linear layer: bitsandbytes computes in its input's precision."""
    x = inputs[0]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return (x, *inputs[1:])
