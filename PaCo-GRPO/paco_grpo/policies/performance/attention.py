"""Attention backends of diffusers; the numbers are equal up to rounding."""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _check_attention_backend_requirements,
    _maybe_download_kernel_for_backend,
    dispatch_attention_fn,
)

from paco_grpo.policies.base import Policy, unwrap
from paco_grpo.policies.performance import AccelerationError
from paco_grpo.suggest import did_you_mean

# The backends of diffusers that have a backward. Sage's are 8-bit and for inference only, and the wrapper of a locally
# built FlashAttention 3 (_flash_3) registers no gradient (the hub's does). *_hub names download a kernel.
ATTENTION_BACKENDS = (
    "native", "_native_cudnn", "_native_flash", "_native_efficient", "_native_math", "flex", "flash", "flash_varlen",
    "flash_hub", "flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub", "xformers",
)  # fmt: skip


def attention_problem(name: str) -> str | None:
    """Why the backend ``name`` cannot be used (unknown, or its package is missing), None if it can; needs no device."""
    if name not in ATTENTION_BACKENDS:
        known = name in [member.value for member in AttentionBackendName]
        why = "has no backward, so it cannot train" if known else "is not known"
        return f"{name!r} {why}.{did_you_mean(name, ATTENTION_BACKENDS)} Known: {', '.join(ATTENTION_BACKENDS)}"
    try:
        _check_attention_backend_requirements(AttentionBackendName(name))
    except RuntimeError as error:
        return f"{name!r} cannot be used here: {error}"
    return None


def try_attention(name: str, device: torch.device, dtype: torch.dtype, masked: bool) -> None:
    """A small attention with its backward, to know before weights are loaded that it works on this machine.

    Args:
        name: One of ``ATTENTION_BACKENDS``.
        device: Where the transformer will compute.
        dtype: Data type of its activations.
        masked: Whether the model masks padded text.

    Raises:
        AccelerationError: It does not work.
    """
    shape = (1, 128, 2, 128)  # batch, tokens, heads, channels of a head (FLUX and Qwen-Image have 128)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 1, 128, device=device, dtype=torch.bool) if masked else None
    try:
        _maybe_download_kernel_for_backend(AttentionBackendName(name))
        # As in the models: q and k from a norm, which autocast may leave in float32; v from a linear layer.
        with torch.autocast(device.type, dtype=dtype) if dtype != torch.float32 else nullcontext():
            out = dispatch_attention_fn(q, k, v.to(dtype), attn_mask=mask, backend=_one_dtype(name))
        out.float().sum().backward()
    except Exception as error:  # kernels raise anything
        what = "with a mask of padded text " if masked else ""
        raise AccelerationError(
            f"attention backend {name!r} does not work {what}on {device} in {dtype}: {type(error).__name__}: "
            f"{str(error)[:300]}"
        ) from error


def set_attention(policy: Policy, name: str) -> None:
    """Compute every attention of the transformer with the backend ``name``."""
    _one_dtype(name)
    default = _AttentionBackendRegistry.get_active_backend()[0]
    unwrap(policy.transformer).set_attention_backend(name)
    _AttentionBackendRegistry.set_active_backend(default)  # diffusers makes it the default of all other models, too


def _one_dtype(name: str) -> AttentionBackendName:
    """The backend ``name``, from now on with q and k in the data type of v.

    CUDA's autocast computes the norms of q and k in float32 and leaves them so; of all attentions it casts the inputs of
    ``F.scaled_dot_product_attention`` alone. The same cast at the same place gives the same bits.
    """
    backend = AttentionBackendName(name)
    compute = _AttentionBackendRegistry._backends[backend]

    @wraps(compute)
    def cast_then_compute(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> torch.Tensor:
        return compute(query=query.to(value.dtype), key=key.to(value.dtype), value=value, **others)

    if not hasattr(compute, "__wrapped__"):
        _AttentionBackendRegistry._backends[backend] = cast_then_compute
    return backend
