"""A policy small enough for finite differences: v = a·x + b·σ·c, with two parameters, and a counter of forwards."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from paco_grpo.policies.base import Policy
from paco_grpo.types import Conditioning


@dataclass
class ToyConditioning(Conditioning):
    direction: torch.Tensor  # (B, N, C)


class _Velocity(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.current = nn.Parameter(torch.tensor([0.3, -0.7], dtype=dtype))

    def forward(self, x, sigma, direction, parameters):
        return parameters[0] * x + parameters[1] * sigma.view(-1, 1, 1) * direction


class ToyPolicy(Policy):
    """``parameters`` in use: current, ``base`` inside ``reference()``, ``old_parameters`` inside ``snapshot("old")``."""

    size_multiple = 4
    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype = torch.float32, tokens: int = 6, channels: int = 4) -> None:
        self.dtype = dtype
        self.transformer = _Velocity(dtype)
        self.base = torch.tensor([0.1, -0.2], dtype=dtype)
        self.old_parameters = torch.tensor([0.25, -0.6], dtype=dtype)
        self.shape = (tokens, channels)
        self.calls: list[int] = []
        self._override = None

    @classmethod
    def from_pretrained(cls, path, **options):
        return cls()

    def autocast(self):
        raise AssertionError("the toy computes in its own dtype")

    def encode(self, items):
        return ToyConditioning(torch.stack([self._normal(100 + item.item_id) for item in items]))

    def sigmas(self, num_steps, height, width):
        return torch.cat([torch.linspace(1, 1 / num_steps, num_steps), torch.zeros(1)]).to(self.dtype)

    def initial_latents(self, seeds, height, width):
        return torch.stack([self._normal(seed) for seed in seeds])

    def velocity(self, latents, sigma, conditioning, height, width):
        self.calls.append(latents.shape[0])
        parameters = self.transformer.current if self._override is None else self._override
        return self.transformer(latents, sigma, conditioning.direction, parameters)

    def decode(self, latents, height, width):
        raise NotImplementedError

    def save_lora(self, directory):
        raise NotImplementedError

    @contextmanager
    def _using(self, parameters):
        self._override = parameters
        yield
        self._override = None

    def reference(self):
        return self._using(self.base)

    def snapshot(self, name):
        return self._using(self.old_parameters)

    def _normal(self, seed):
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(int(seed)), dtype=self.dtype)
