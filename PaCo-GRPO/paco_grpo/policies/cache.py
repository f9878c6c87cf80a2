"""Encoded inputs kept on the CPU, least recently used dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch


class TensorCache:
    """Tuples of tensors by key, at most ``max_bytes`` in all (one entry is kept whatever its size)."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[torch.Tensor, ...]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable, compute: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """The tensors of ``key``; ``compute`` is called where they are not held, and its result is moved to the CPU."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        entry = tuple(tensor.cpu() for tensor in compute())
        self._entries[key] = entry
        self.num_bytes += _num_bytes(entry)
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)
        return entry


def _num_bytes(entry: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in entry)
