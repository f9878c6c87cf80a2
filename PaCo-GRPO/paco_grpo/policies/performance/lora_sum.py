"""A LoRA layer's output in fewer operations than in peft, through peft's seam for variants of LoRA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import nn

from paco_grpo.policies.performance.onednn import linear


def add_in_one_kernel(layers: Iterable[LoraLayer], adapter: str) -> None:
    """From now on ``layers`` add scale · B·A·x of ``adapter`` without storing the product with the scale before."""
    for layer in layers:
        layer.lora_variant[adapter] = _Sum


class _Sum(LoraVariant):
    """y + s·u as one operation; the bits of peft's two if s is a power of two, such as the default 128 / 64.

    In float32 on a CPU B·u is not stored either: equal to rounding.
    """

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_) -> torch.Tensor:
        """``result`` (…, out) of the base layer plus the adapter's part for ``x`` (…, in)."""
        down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
        x, scale = module.lora_dropout[active_adapter](x), module.scaling[active_adapter]
        # The result of a plain layer belongs to nobody else.
        plain = type(module.get_base_layer()) is nn.Linear and not torch.compiler.is_compiling()
        if plain and x.device.type == "cpu" and x.dtype == result.dtype == down.weight.dtype == torch.float32:
            return _AddInPlace.apply(result, x, down.weight, up.weight, scale)
        return torch.add(result, up(down(x)), alpha=scale)

    @staticmethod
    def merge_unsafe(module: LoraLayer, active_adapter: str, orig_weight: torch.Tensor) -> None:
        """As for an adapter without a variant."""
        orig_weight.data += module.get_delta_weight(active_adapter)


class _AddInPlace(torch.autograd.Function):
    """y += s·B·A·x. A BLAS takes several times as long for products of a low rank in the order in which PyTorch asks."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        inner = linear(x, a)
        y.view(-1, y.shape[-1]).addmm_(inner.flatten(0, -2), b.t(), alpha=scale)
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, inner, a, b)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, of_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        of_inner = linear(of_y, b.t().contiguous()).mul_(ctx.scale)
        of_x = linear(of_inner, a.t().contiguous()) if ctx.needs_input_grad[1] else None
        of_a = of_inner.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        of_b = (inner.flatten(0, -2).t() @ of_y.flatten(0, -2)).t() * ctx.scale if ctx.needs_input_grad[3] else None
        return of_y, of_x, of_a, of_b, None
