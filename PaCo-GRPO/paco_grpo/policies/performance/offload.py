"""Frozen modules that are on the device only while they compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Offloaded:
    """Keeps the weights of ``modules`` on the CPU, and copies them to ``device`` inside ``on_device``.

    The originals stay on the CPU, so leaving costs nothing and changes no bit.

    Args:
        modules: Frozen; their parameters and buffers are read once, here.
        device: Where they compute.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
        self._originals = [(tensor, tensor.data.cpu()) for tensor in tensors.values()]
        self._users = 0
        self._on_device = True
        self._leave_unless_used()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The modules are on the device inside; blocks may be nested."""
        with self.keep_on_device():
            if not self._on_device:
                for tensor, original in self._originals:
                    tensor.data = original.to(self.device, copy=True)
                self._on_device = True
            yield

    @contextmanager
    def keep_on_device(self) -> Iterator[None]:
        """Once copied, the modules stay on the device until the end of this block: one transfer for several inputs."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self._leave_unless_used()

    def _leave_unless_used(self) -> None:
        if self._on_device and not self._users:
            for tensor, original in self._originals:
                tensor.data = original
            self._on_device = False
