"""Frozen modules that are on the device only while they compute."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Offloaded:
    """Keeps the weights of ``modules`` on the CPU, and copies them to ``device`` inside ``on_device``.

    The originals stay on the CPU, so leaving costs nothing and changes no bit.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        tensors = {
            id(t): t for module in modules for t in (*module.parameters(), *module.buffers())
        }
        self._originals = [(tensor, tensor.data.cpu()) for tensor in tensors.values()]
        self._users = 0
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Of nested blocks, the first one copies and the last one leaves."""
        if not self._users:
            for tensor, original in self._originals:
                tensor.data = original.to(self.device, copy=True)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._leave()

    def _leave(self) -> None:
        for tensor, original in self._originals:
            tensor.data = original
