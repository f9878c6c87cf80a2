"""Encoded inputs kept on the CPU, and diffusers' first-block cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from diffusers import FirstBlockCacheConfig

from paco_grpo.policies.base import Policy, unwrap


class TensorCache:
    """Tuples of tensors by key, ``max_bytes`` in total (but at least one entry); the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[torch.Tensor, ...]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable, compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """The tensors of ``key``; if they are not held, the result of ``compute`` is moved to the CPU and kept."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        entry = self._entries[key] = tuple(tensor.cpu() for tensor in compute())
        self.num_bytes += sum(tensor.nbytes for tensor in entry)
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= sum(tensor.nbytes for tensor in dropped)
        return entry


@contextmanager
def first_block_cache(policy: Policy, threshold: float) -> Iterator[None]:
    """Inside the block, a forward whose first transformer block changes its input nearly as in the last forward reuses what
    the other blocks added there instead of computing them.

    The cache is empty at the start. The decision is one for a whole batch, so a sample depends on its batch mates. The
    result is approximate: for the part of a rollout that enters no log-probability.

    Args:
        policy: Its velocity must run inside ``cache_context``, as that of ``DiffusersPolicy`` does.
        threshold: Largest mean change of the first block's residual, relative to it, that counts as nearly the same.
    """
    transformer = unwrap(policy.transformer)
    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        yield
    finally:
        transformer.disable_cache()
