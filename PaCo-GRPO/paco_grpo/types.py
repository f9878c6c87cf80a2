"""What travels between the packages of PaCo-GRPO: items, conditioning, rollouts.

Shape notation everywhere: B batch, T sampling steps, N latent tokens, C latent channels, H W pixels, h w latent cells.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from paco_grpo.item import Item  # noqa: F401


@dataclass
class Batched:
    """Rows that travel together.

    A tensor field has the batch as its leading dimension; a ``Batched`` field, or a list of them, has the same rows. Any
    other field, and a tensor with the metadata ``shared``, is the same for the whole batch; ``cat`` refuses to join different
    ones.
    """

    def __len__(self) -> int:
        for value in self._values().values():
            if isinstance(value, torch.Tensor):
                return value.shape[0]
        raise ValueError(f"{type(self).__name__} has no tensor field, so it has no length")

    def select(self, index: torch.Tensor | Sequence[int] | slice) -> Self:
        """Rows ``index`` (LongTensor, BoolTensor, list of int or slice), as a new object of the same class."""
        changes: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, torch.Tensor):
                rows = index if isinstance(index, slice) else to_device(torch.as_tensor(index), value.device)
                changes[name] = value[rows]
            elif isinstance(value, Batched):
                changes[name] = value.select(index)
            elif _is_list_of_batched(value):
                changes[name] = [part.select(index) for part in value]
        return dataclasses.replace(self, **changes)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join along the batch. Raises ValueError where a shared value differs."""
        if len(parts) == 1:
            return parts[0]
        joined, batched = {}, parts[0]._values()
        for name in (f.name for f in dataclasses.fields(parts[0])):
            first, *others = values = [getattr(part, name) for part in parts]
            if isinstance(first, torch.Tensor) and name in batched:
                joined[name] = torch.cat(values)
            elif isinstance(first, Batched):
                joined[name] = type(first).cat(values)
            elif _is_list_of_batched(first) and all(len(other) == len(first) for other in others):
                joined[name] = [type(steps[0]).cat(steps) for steps in zip(*values, strict=True)]
            else:
                for other in others:
                    if not (torch.equal(first, other) if isinstance(first, torch.Tensor) else first == other):
                        raise ValueError(f"cannot join {type(parts[0]).__name__}.{name}: {first} and {other} differ")
                joined[name] = first
        return type(parts[0])(**joined)

    def _values(self) -> dict[str, Any]:
        """The fields that are not marked as shared."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if "shared" not in f.metadata}


def _is_list_of_batched(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Batched)


class Conditioning(Batched):
    """What a policy's ``encode`` computed from prompts (and reference images), one row per sample; subclasses add fields."""


@dataclass
class NoiseStep(Batched):
    """A sampling step at which noise was injected; its log-probability can be recomputed exactly from it."""

    index: int  # position in the schedule
    latents: torch.Tensor  # (B, N, C) float32, x_t before the step
    next_latents: torch.Tensor  # (B, N, C) float32, x' after it
    mean: torch.Tensor  # (B, N, C) float32, mean of x' under the sampling policy
    log_prob: torch.Tensor  # (B,) float32, log p(x' | x_t) under the sampling policy, averaged over N and C


@dataclass
class Rollout(Batched):
    """What training needs of sampled images. All samples share image size, schedule, noise level and noise steps."""

    item_ids: torch.Tensor  # (B,) int64 on the CPU
    seeds: torch.Tensor  # (B,) int64 on the CPU, where noise is made: seed of each sample's noise
    clean_latents: torch.Tensor  # (B, N, C) float32, x_0
    conditioning: Conditioning  # len B
    noise_steps: list[NoiseStep]  # ascending by index; empty for deterministic sampling
    sigmas: torch.Tensor = field(metadata={"shared": True})  # (T+1,) float32 on the CPU, whole schedule, 1 → 0
    height: int  # pixels
    width: int  # pixels
    noise_level: float  # a
    cps: bool  # Flow-CPS instead of Flow-SDE

    def noise_step(self, index: int) -> NoiseStep:
        """The recorded noise at step ``index`` of the schedule.

        Raises:
            KeyError: No noise was injected there.
        """
        for step in self.noise_steps:
            if step.index == index:
                return step
        raise KeyError(f"step {index} has no recorded noise; noise steps: {[step.index for step in self.noise_steps]}")


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` on ``device``; to CUDA by way of page-locked memory, behind what was launched there before.

    A plain copy makes the host wait until the GPU has done all that, so the GPU then waits for the next launch. For small
    tensors within a rollout; locked memory is kept by torch for the next one.
    """
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
