"""Attention backends of diffusers; the numbers are equal up to rounding."""

import torch
from diffusers import attention_backend
from torch import nn

from paco_grpo.options import ConfigError
from paco_grpo.policies.base import Policy
from paco_grpo.suggest import did_you_mean

# The backends of diffusers that have a backward. Sage's are 8-bit and for inference only, and the wrapper of a locally
# built FlashAttention 3 (_flash_3) registers no gradient (the hub's does). *_hub names download a kernel.
ATTENTION_BACKENDS = (
    "native", "_native_cudnn", "_native_flash", "_native_efficient", "_native_math", "flex", "flash", "flash_varlen",
    "flash_hub", "flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub", "xformers",
)  # fmt: skip


def attention_problem(name: str) -> str | None:
    """Why the backend ``name`` cannot train, None if it can; needs no device."""
    if name in ATTENTION_BACKENDS:
        return None
    near = did_you_mean(name, ATTENTION_BACKENDS)
    return f"{name!r} is unknown, or has no backward.{near} Known: {', '.join(ATTENTION_BACKENDS)}"


def set_attention(policy: Policy, name: str) -> None:
    """Compute every attention of the transformer with the backend ``name``; a ``ConfigError`` without its package."""
    transformer = policy.transformer
    try:
        with attention_backend(
            name
        ):  # the default of all other models is restored: diffusers would change it, too
            transformer.set_attention_backend(name)
    except (RuntimeError, ImportError) as error:
        raise ConfigError(f"config.speed.attention={name!r}: {error}") from error
    if "native" in name:
        return
    # CUDA's autocast leaves the norms of q and k in float32, and casts the inputs of PyTorch's own attention alone.
    for module in transformer.modules():
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            if isinstance(getattr(module, norm, None), nn.Module):
                getattr(module, norm).register_forward_hook(_as_autocast)


def _as_autocast(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output
