"""A transformer on a CPU: linear layers through oneDNN, as torch.compile computes them there, but without compiling, and in
forwards without gradient fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import nn

from paco_grpo.policies.base import Policy, unwrap
from paco_grpo.policies.performance.compile import is_compiled
from paco_grpo.policies.performance.repeated import replaced_forward


@contextmanager
def through_onednn(policy: Policy) -> Iterator[None]:
    """Inside the block linear layers, with the GELU behind one, are oneDNN's, and norms and FLUX's single blocks are
    computed in fewer operations: equal to rounding, and about 20 % less time for a FLUX forward than PyTorch takes on an
    AMD CPU. Nothing changes but in float32 on a CPU, or in compiled blocks.

    For forwards without gradient and with merged adapters: layers are asked for their base weights alone.
    """
    usable = policy.device.type == "cpu" and policy.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    with ExitStack() as stack:
        if usable and not is_compiled(policy):
            for module, forward in _forwards(unwrap(policy.transformer)).items():
                stack.enter_context(replaced_forward(module, forward))
        yield


def frozen_layers_through_onednn(transformer: nn.Module) -> None:
    """From now on all linear layers whose weights are not trained are oneDNN's in float32 on a CPU, with gradients too."""
    if torch.backends.mkldnn.is_available():
        for module in transformer.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_frozen_linear, module)


def _forwards(model: nn.Module) -> dict[nn.Module, Callable]:
    found: dict[nn.Module, Callable] = {}
    for module in model.modules():
        if type(module) is nn.Linear:
            found[module] = partial(_layer, module)
        elif isinstance(module, GELU):
            found[module] = partial(_layer, _base(module.proj), gelu=module.approximate)
        elif isinstance(module, nn.RMSNorm):
            found[module] = partial(_rms_norm, module)
        elif isinstance(module, AdaLayerNormZero | AdaLayerNormZeroSingle) and getattr(module, "emb", None) is None:
            found[module] = partial(_modulated_norm, module)
        elif isinstance(module, FluxSingleTransformerBlock):
            found[module] = partial(_single_block, module)
    return found


def _base(layer: nn.Module) -> nn.Linear:
    return getattr(layer, "base_layer", layer)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, gelu: str | None = None
) -> torch.Tensor:
    """x·Wᵀ + b by oneDNN, without autograd, then a GELU with that approximation: float32 on a CPU."""
    after = ("none", [], "") if gelu is None else ("gelu", [], gelu)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, *after)


def _layer(layer: nn.Linear, x: torch.Tensor, gelu: str | None = None) -> torch.Tensor:
    return linear(x, layer.weight, layer.bias, gelu)


def _frozen_linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    ours = x.device.type == "cpu" and x.dtype == layer.weight.dtype == torch.float32 and not layer.weight.requires_grad
    if ours and not torch.compiler.is_compiling():
        return _Linear.apply(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b with frozen W and b."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.new_empty(0).set_(linear(x, weight, bias))  # no view, so that an adapter may add to it in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return linear(gradient, weight.t().contiguous()), None, None


def _rms_norm(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """One pass for the root mean square, two for the product; PyTorch takes five."""
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    normed = x * mean.add_(eps).rsqrt_()
    return normed if norm.weight is None else normed.mul_(norm.weight)


def _modulated_norm(norm: nn.Module, x: torch.Tensor, emb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(1 + scale) · norm(x) + shift as one operation, then the block's other modulations."""
    shift, scale, *others = norm.linear(norm.silu(emb)).chunk(6 if isinstance(norm, AdaLayerNormZero) else 3, dim=1)
    return torch.addcmul(shift[:, None], norm.norm(x), 1 + scale[:, None]), *others


def _single_block(
    block: FluxSingleTransformerBlock,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block without the copy of attention and feed-forward side by side: their parts of ``proj_out`` are added."""
    length = encoder_hidden_states.shape[1]
    x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    normed, gate = block.norm(x, emb=temb)
    attended = block.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
    inner = _layer(_base(block.proj_mlp), normed, gelu=block.act_mlp.approximate)
    out = _base(block.proj_out)
    of_attended, of_inner = (w.contiguous() for w in out.weight.split([attended.shape[-1], inner.shape[-1]], dim=1))
    y = linear(attended, of_attended, out.bias)
    y = torch.ops.mkldnn._linear_pointwise.binary(inner, y, of_inner, None, "add")
    x.addcmul_(gate[:, None], y)
    return x[:, :length], x[:, length:]
