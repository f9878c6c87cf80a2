"""Exponential moving average of the trainable weights, counted in optimizer steps (docs/method.md §6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from paco_grpo.distributed.collectives import shard_like


class EMA:
    """Shadow copies of parameters: shadow ← d·shadow + (1 − d)·weight, d = min((1+s)/(10+s), decay).

    s counts optimizer steps; the average moves at every ``update_interval``-th of them.

    Args:
        parameters: Name → trainable parameter.
        decay: Upper bound of d, in [0, 1).
        update_interval: Optimizer steps between two moves.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float, update_interval: int) -> None:
        self.parameters = dict(parameters)
        self.decay, self.update_interval = decay, update_interval
        self.shadow = {name: p.detach().clone().float() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average after optimizer step number ``step`` (the first is 1)."""
        if step % self.update_interval:
            return
        decay = min((1 + step) / (10 + step), self.decay)
        for name, parameter in self.parameters.items():
            self.shadow[name].lerp_(parameter.detach().float(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average inside the block, and exactly their former values after it."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._copy(self.shadow)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name].to(parameter.device))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages, float32."""
        return self.shadow

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the averages.

        Raises:
            KeyError: ``state`` belongs to other parameters.
        """
        if set(state) != set(self.shadow):
            raise KeyError("the saved average belongs to other parameters (another lora_rank or other targets?)")
        for name, value in state.items():
            self.shadow[name].copy_(shard_like(value, self.shadow[name]))
