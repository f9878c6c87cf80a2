"""Faster forwards of a policy's transformer: compiled blocks, attention back ends, and a first-block cache.

All three are diffusers' own. The first two give the same numbers to rounding and are for rollout and training alike;
the third changes them and is for the part of a rollout that enters no log-probability.
"""

from __future__ import annotations

import difflib
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _check_attention_backend_requirements,
    dispatch_attention_fn,
)

from paco_grpo.policies.adapters import unwrap
from paco_grpo.policies.base import Policy

logger = logging.getLogger(__name__)

# Of diffusers' back ends, those that have a backward: sage's are 8-bit and for inference alone, and its wrapper of a
# locally built FlashAttention 3 (_flash_3) registers no gradient (that of the hub does). *_hub names download a kernel.
ATTENTION_BACKENDS = (
    "native", "_native_cudnn", "_native_flash", "_native_efficient", "_native_math", "flex", "flash", "flash_varlen",
    "flash_hub", "flash_varlen_hub", "_flash_3_hub", "_flash_3_varlen_hub", "xformers",
)  # fmt: skip

# Compiled variants of one block: adapter (current, old, off, merged) x gradient or not x batch of one or more x mask or
# not; dynamo's default of 8 would let later ones run uncompiled, with a warning that is easily missed.
_MOST_VARIANTS = 64


class AccelerationError(RuntimeError):
    """What was asked for cannot be had here; the message says what is missing."""


def compile_blocks(policy: Policy, backend: str = "inductor") -> None:
    """``torch.compile`` each repeated block of the transformer in place (regional compilation).

    Blocks of one class share their compiled code, so compiling takes the time of one block, not of the model. Sizes are
    symbolic from the start: a size or batch that comes later is no reason to compile again (a batch of one is), and which
    kernels are used does not depend on what was computed first, so a resumed run uses the same ones. Names of modules and
    weights stay as they are. Compiling happens at the first forward of each kind.

    Args:
        policy: With its adapters in place.
        backend: Of ``torch.compile``.

    Raises:
        AccelerationError: The transformer does not say which of its blocks repeat, or there is no compiler.
    """
    transformer = unwrap(policy.transformer)
    if not getattr(transformer, "_repeated_blocks", None):
        raise AccelerationError(f"{type(transformer).__name__} does not name repeated blocks (_repeated_blocks)")
    if backend == "inductor":
        require_compiler()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VARIANTS)
    transformer.compile_repeated_blocks(dynamic=True, backend=backend)


def is_compiled(policy: Policy) -> bool:
    """Whether :func:`compile_blocks` was called."""
    return any(module._compiled_call_impl is not None for module in unwrap(policy.transformer).modules())


def require_compiler() -> None:
    """Find a compiler for the code that inductor writes (C++ on a CPU; Triton needs a C compiler too).

    Raises:
        AccelerationError: There is none.
    """
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise AccelerationError("torch.compile needs a C++ compiler, and there is no g++, clang++ or c++ on PATH")


def attention_problem(name: str) -> str | None:
    """What speaks against the attention back end ``name``, without a device: unknown, or its package is not there."""
    if name not in ATTENTION_BACKENDS:
        near = difflib.get_close_matches(name, ATTENTION_BACKENDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = name in [member.value for member in AttentionBackendName]
        why = "has no backward, so it cannot train" if known else "is not known"
        return f"{name!r} {why}.{hint} Known: {', '.join(ATTENTION_BACKENDS)}"
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
        dtype: Of its activations.
        masked: Whether the model masks padded text.

    Raises:
        AccelerationError: It does not work.
    """
    shape = (1, 128, 2, 128)  # batch, tokens, heads, channels of a head (FLUX and Qwen-Image have 128)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 1, 128, device=device, dtype=torch.bool) if masked else None
    try:
        out = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=AttentionBackendName(name))
        out.float().sum().backward()
    except Exception as error:  # kernels raise what they like
        what = "with a mask of padded text " if masked else ""
        raise AccelerationError(
            f"attention back end {name!r} does not work {what}on {device} in {dtype}: {type(error).__name__}: "
            f"{str(error)[:300]}"
        ) from error


def set_attention(policy: Policy, name: str) -> None:
    """Every attention of the transformer by the back end ``name``."""
    unwrap(policy.transformer).set_attention_backend(name)


@contextmanager
def block_cache(policy: Policy, threshold: float) -> Iterator[None]:
    """Inside the block, a forward whose first transformer block changes its input nearly as the last forward's did
    takes what the other blocks added there, and does not compute them (first-block cache).

    The cache is empty at the start. The decision is one for a whole batch, so a sample depends on its batch mates.

    Args:
        policy: Its velocity must run inside ``cache_context``, as the diffusers policies' does.
        threshold: Largest mean change of the first block's residual, relative to it, that counts as nearly the same.
    """
    transformer = unwrap(policy.transformer)
    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        yield
    finally:
        transformer.disable_cache()
