"""Encoded inputs kept on the CPU."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch


class TensorCache:
    """Tuples of tensors by key, ``max_bytes`` in total (but at least one entry); the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Hashable, tuple[torch.Tensor, ...]] = OrderedDict()

    def get(
        self, key: Hashable, compute: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of ``key``: held ones, or the result of ``compute``, moved to the CPU."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        entry = self._entries[key] = tuple(tensor.cpu() for tensor in compute())
        self.num_bytes += sum(tensor.nbytes for tensor in entry)
        while self.num_bytes > self.max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= sum(tensor.nbytes for tensor in dropped)
        return entry
