"""What travels between the packages of PaCo-GRPO: items, conditioning, rollouts, streams.

Shape notation everywhere: B batch, T denoising steps, L latent tokens, C latent channels, H W
pixels, h w latent cells. N are the images of an epoch over all processes, n those of one process.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

import torch

from paco_grpo.item import Item  # noqa: F401


@dataclass
class Batched:
    """Rows that travel together.

    A tensor field has the batch as its leading dimension; a ``Batched`` field, or a list of them,
    has the same rows. Any other field, and a tensor with the metadata ``shared``, is the same for
    the whole batch.
    """

    def __len__(self) -> int:
        values = self._values().values()
        return next(len(value) for value in values if isinstance(value, torch.Tensor))

    def select(self, index: torch.Tensor | Sequence[int] | slice) -> Self:
        """Rows ``index`` (LongTensor, BoolTensor, list of int or slice), as a new object."""
        rows = {name: _select(value, index) for name, value in self._values().items()}
        return dataclasses.replace(self, **rows)

    def split(self) -> list[Self]:
        """The rows, each as an object of one row; tensors are views."""
        return [self.select(slice(row, row + 1)) for row in range(len(self))]

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join along the batch. Raises ValueError where a shared value differs."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if type(first) is not cls:
            return type(first).cat(parts)
        joined = {}
        for field_ in dataclasses.fields(first):
            values = [getattr(part, field_.name) for part in parts]
            if "shared" not in field_.metadata:
                joined[field_.name] = _cat(values)
            elif not all(torch.equal(value, values[0]) for value in values):
                raise ValueError(f"cannot join {type(first).__name__}: {field_.name} differs")
        return dataclasses.replace(first, **joined)

    def _values(self) -> dict[str, Any]:
        """The fields that are not marked as shared."""
        names = [f.name for f in dataclasses.fields(self) if "shared" not in f.metadata]
        return {name: getattr(self, name) for name in names}


def _select(value: Any, index: torch.Tensor | Sequence[int] | slice) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(index, slice):
            index = to_device(torch.as_tensor(index), value.device)
        return value[index]
    if isinstance(value, list):
        return [_select(part, index) for part in value]
    return value.select(index) if isinstance(value, Batched) else value


def _cat(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values)
    if isinstance(first, list):
        return [_cat(parts) for parts in zip(*values, strict=True)]
    if isinstance(first, Batched):
        return first.cat(values)
    if any(value != first for value in values):
        raise ValueError(f"cannot join: {values} differ")
    return first


class Conditioning(Batched):
    """What a policy's ``encode`` computed from prompts and reference images.

    One row per sample; subclasses add fields.
    """


@dataclass
class NoiseStep(Batched):
    """A denoising step at which noise was injected."""

    index: int  # position in the schedule
    latents: torch.Tensor  # (B, L, C) float32, x_t before the step
    next_latents: torch.Tensor  # (B, L, C) float32, x' after it
    # Under the weights that sampled, or under those before the update where
    # ``Updater.recompute_old_log_probs`` has replaced both:
    mean: torch.Tensor  # (B, L, C) float32, mean of x'
    log_prob: torch.Tensor  # (B,) float32, log p(x' | x_t), averaged over tokens and channels


@dataclass
class Rollout(Batched):
    """What training needs of sampled images."""

    item_ids: torch.Tensor  # (B,) int64 on the CPU
    seeds: torch.Tensor  # (B,) int64 on the CPU, where noise is made: seed of each sample's noise
    clean_latents: torch.Tensor  # (B, L, C) float32, x_0
    conditioning: Conditioning  # len B
    noise_steps: list[NoiseStep]  # ascending by index; empty for deterministic sampling
    # (T+1,) float32 on the CPU, whole schedule, 1 → 0
    sigmas: torch.Tensor = field(metadata={"shared": True})
    height: int  # pixels
    width: int  # pixels
    noise_level: float  # a
    transition: str  # of its noise steps, as ``sampling.denoise.find_transition`` names it

    def noise_step(self, index: int) -> NoiseStep:
        """The recorded noise at step ``index`` of the schedule."""
        return {step.index: step for step in self.noise_steps}[index]


class Stream(IntEnum):
    """The first word of a random stream's seed; ``config.seed``, the epoch and others follow.

    So two streams are unrelated, even where the other words are equal. Two seeds have no such word:
    (seed, epoch) of the choice of noise steps, and (seed of the sample, step) of a step's noise.
    """

    PROMPTS = 11  # which prompts an epoch has
    SAMPLE_ORDER = 12  # order of an epoch's samples over all processes
    SAMPLE_SEEDS = 13  # seed of each sample's noise
    INITIAL_SEEDS = 14  # seeds of initial noise that samples share
    PASS_ORDER = 15  # order of the samples in the second and further passes over an epoch
    TRAINED_STEPS = 16  # which steps of the schedule are trained
    SHARED_NOISE = 17  # training noise that samples share
    GLOBAL = 18  # the generators of Python, NumPy and torch
    EVALUATION = 21  # initial noise of the test images; its seed is config.test.seed
    PROBE = 31  # initial noise of the health probe's images


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor``, a small one, on ``device``, without waiting for what runs there.

    It goes to CUDA by way of page-locked memory. A plain copy makes the host wait until the GPU has
    done everything, and then the GPU for the next launch.
    """
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
