"""Bytes of live tensors, now and at the peak, for real tensors and for those on the meta device.

``LiveBytes`` sees every operation and follows the storages it creates until they die, which is what the
``memory_allocated`` of a caching allocator shows. On the meta device nothing is computed or allocated, so a model of any
size can be counted on any machine.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

BLOCK = 512  # bytes; CUDA's caching allocator rounds up to it


class LiveBytes(TorchDispatchMode):
    """Counts the storages created inside the block; what existed before (weights) is not counted.

    Attributes:
        now: Bytes alive, each storage rounded up to ``block``.
        peak: Largest value of ``now``.
    """

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__()
        self.block = block
        self.now = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """See TorchDispatchMode."""
        result = func(*args, **(kwargs or {}))
        given = {_identity(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _identity(tensor) not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // self.block) * self.block
        self.now += size
        self.peak = max(self.peak, self.now)
        self._known[key] = weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.now -= size


class SavedBytes:
    """Bytes that autograd saves for the backward pass, each storage once, without parameters and buffers.

    with SavedBytes(module) as saved: loss = ...
    saved.total
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._own = {_identity(t) for t in (*module.parameters(), *module.buffers())}
        self._seen: dict[int, int] = {}
        self._held: list[torch.Tensor] = []  # so that no address is reused
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _identity(tensor)
        if key not in self._own and key not in self._seen:
            self._seen[key] = tensor.untyped_storage().nbytes()
            self._held.append(tensor.detach())
        return tensor

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(self._seen.values())

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._held.clear()


class MetaAutocast(TorchFunctionMode):
    """Autocast and flash attention for tensors on the meta device, which has neither.

    The lists are those of ATen/autocast_mode.h (CUDA) in the pinned torch, as far as these generators use them. A
    float32 layer norm, for example, saves four bytes per element of a bfloat16 input. Like autocast's cache, the mode
    casts a trained weight once.

    Args:
        dtype: Data type of matrix products; None = no autocast, attention alone is replaced.
        float32: Functions whose inputs become float32.
    """

    LOW = frozenset(
        {
            functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm,
            torch.addmm, torch.baddbmm, torch.einsum, functional.conv2d, functional.conv3d,
        }
    )  # fmt: skip
    FLOAT32 = frozenset(
        {
            functional.layer_norm, torch.layer_norm, functional.rms_norm, torch.rms_norm, functional.group_norm,
            torch.group_norm, torch.rsqrt, torch.Tensor.rsqrt, torch.pow, torch.Tensor.pow, torch.exp,
            torch.Tensor.exp, torch.log, torch.Tensor.log,
        }
    )  # fmt: skip

    def __init__(self, dtype: torch.dtype | None = None, float32: frozenset = FLOAT32) -> None:
        super().__init__()
        self.dtype, self.float32 = dtype, float32
        self._cache: dict[int, torch.Tensor] = {}

    def __exit__(self, *error: object) -> None:
        """Forget the cast weights."""
        self._cache.clear()
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """See TorchFunctionMode."""
        kwargs = kwargs or {}
        attention = func is functional.scaled_dot_product_attention
        if self.dtype is not None:
            if attention or func in self.LOW:
                args, kwargs = tree_map(self._low, (tuple(args), kwargs))
            elif func in self.float32:
                args, kwargs = tree_map(_float32, (tuple(args), kwargs))
        return _flash_attention(*args, **kwargs) if attention else func(*args, **kwargs)

    def _low(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == self.dtype:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.dtype)
        if id(value) not in self._cache:
            self._cache[id(value)] = value.to(self.dtype)
        return self._cache[id(value)]


def _flash_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Fused attention: saves query, key, value, result and log-sum-exp, never the attention matrix."""
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


def bytes_of(module: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers of ``module``; shared ones count once."""
    tensors = {_identity(t): t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())


def _identity(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _float32(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
