"""Frozen modules that are on the accelerator only while they compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class Offloaded:
    """Keeps the weights of ``modules`` on the CPU, and a copy on ``device`` inside :meth:`at_work`.

    The CPU's are the originals and stay where they are: leaving costs nothing, and no bit changes. They are not
    page-locked: T5-XXL (9.5 GB, so two seconds at 5 GB/s) comes only when a text is not remembered, while locked memory
    is taken from everything else on the machine, in powers of two, for each process.

    Args:
        modules: Frozen; their parameters and buffers are read once, here.
        device: Where they compute.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        tensors = {id(t): t for module in modules for t in (*module.parameters(), *module.buffers())}
        self._kept = [(tensor, tensor.data.cpu()) for tensor in tensors.values()]
        self._users = self._holders = 0
        self._here = True
        self._leave_unless_needed()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The modules are on the device inside; calls may be nested."""
        self._users += 1
        if not self._here:
            for tensor, home in self._kept:
                tensor.data = home.to(self.device, copy=True)
            self._here = True
        try:
            yield
        finally:
            self._users -= 1
            self._leave_unless_needed()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Once they have come they stay until the end of this block, so that several inputs share one coming."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._leave_unless_needed()

    def _leave_unless_needed(self) -> None:
        if self._here and not self._users and not self._holders:
            for tensor, home in self._kept:
                tensor.data = home
            self._here = False
