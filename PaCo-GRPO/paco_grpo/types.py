"""What travels between the rooms of PaCo-GRPO: items, conditioning, rollout records.

Shape notation everywhere: B batch, S recorded noise steps, T sampling steps, N latent tokens, C latent channels,
H W pixels, h w latent cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

if TYPE_CHECKING:
    from PIL import Image


class _ReadAnew:
    """A field that may be given as a function: it is then called at each reading.

    A prompt set of 46,000 reference images fits into no memory, and PIL keeps an opened image's pixels once read.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return None  # the field's default
        value = instance.__dict__[self._slot]
        return value() if callable(value) else value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._slot] = value


@dataclass(frozen=True)
class Item:
    """One entry of a prompt set.

    Attributes:
        item_id: Position in its data set; groups are formed by it, never by text (two items may share a prompt).
        prompt: Full prompt text.
        height: Requested height in pixels, None = the configured resolution.
        width: Requested width in pixels, None = the configured resolution.
        metadata: The row it was read from.
        image: Reference image of an editing item (RGB), else None. May be given as a function without arguments, which
            is called whenever ``image`` is read: take it once and keep it while it is needed.
    """

    item_id: int
    prompt: str
    height: int | None = None
    width: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    image: Image.Image | None = _ReadAnew()  # type: ignore[assignment]


@dataclass
class Conditioning:
    """What a policy's ``encode`` computed from prompts (and reference images), one row per sample.

    Subclasses add fields. A tensor field has the batch as leading dimension; a field that is None or not a tensor is
    the same for the whole batch (``cat`` refuses to join different ones).
    """

    def __len__(self) -> int:
        for value in self._values().values():
            if isinstance(value, torch.Tensor):
                return value.shape[0]
        raise ValueError(f"{type(self).__name__} has no tensor field, so it has no length")

    def select(self, index: torch.Tensor | Sequence[int] | slice) -> Self:
        """Rows ``index`` (LongTensor, BoolTensor, list of int or slice), as a new object of the same class."""
        return self._map(lambda tensor: tensor[_as_index(index, tensor.device)])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Move every tensor to ``device``; floating-point tensors also to ``dtype`` if one is given."""
        return self._map(lambda tensor: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join along the batch.

        Raises:
            ValueError: ``parts`` is empty, or a field differs in shape (other than the batch) or in shared value.
        """
        if not parts:
            raise ValueError(f"{cls.__name__}.cat needs at least one part")
        if len(parts) == 1:
            return parts[0]
        joined = {
            name: _cat_field(f"{cls.__name__}.{name}", [getattr(part, name) for part in parts])
            for name in parts[0]._values()
        }
        return type(parts[0])(**joined)

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def _map(self, function) -> Self:
        values = self._values()
        return type(self)(**{k: function(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()})


@dataclass
class RolloutRecord:
    """What training needs of a rollout: only the noise steps, and the clean latents.

    All samples of a record share image size, sigma schedule, noise level and noise steps. Latents are the float32
    values that were used, so that log-probabilities can be recomputed exactly.
    """

    item_ids: torch.Tensor  # (B,) int64
    latents: torch.Tensor  # (B, S, N, C) float32, x_t before each noise step
    next_latents: torch.Tensor  # (B, S, N, C) float32, x' after it
    step_mean: torch.Tensor  # (B, S, N, C) float32, mean of x' under the sampling policy
    log_prob: torch.Tensor  # (B, S) float32, log p(x' | x_t) under the sampling policy, averaged over N and C
    step_index: torch.Tensor  # (S,) int64, position of each noise step in the schedule
    sigmas: torch.Tensor  # (T+1,) float32, whole schedule, 1 → 0
    clean_latents: torch.Tensor  # (B, N, C) float32, x_0
    conditioning: Conditioning  # len B
    height: int  # pixels
    width: int  # pixels
    noise_level: float  # a
    cps: bool  # Flow-CPS instead of Flow-SDE
    advantages: torch.Tensor | None = None  # (B,) float32, filled in after the rewards
    weights: torch.Tensor | None = None  # (B,) float32, 0 = left out of the update
    seeds: torch.Tensor | None = None  # (B,) int64, what each sample's noise was drawn from

    _BATCHED: ClassVar[tuple[str, ...]] = (
        "item_ids", "latents", "next_latents", "step_mean", "log_prob", "clean_latents", "conditioning",
        "advantages", "weights", "seeds",
    )  # fmt: skip
    _SHARED: ClassVar[tuple[str, ...]] = ("step_index", "sigmas", "height", "width", "noise_level", "cps")

    def __len__(self) -> int:
        return self.item_ids.shape[0]

    def select(self, index: torch.Tensor | Sequence[int] | slice) -> Self:
        """Samples ``index`` (LongTensor, BoolTensor, list of int or slice), as a new record."""
        changes: dict[str, Any] = {}
        for name in self._BATCHED:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                changes[name] = value[_as_index(index, value.device)]
            elif value is not None:
                changes[name] = value.select(index)
        return dataclasses.replace(self, **changes)

    def select_steps(self, positions: Sequence[int]) -> Self:
        """The recorded steps at ``positions`` (into ``step_index``), as a new record: one step at a time saves memory.

        An objective averages over the steps it is given: a caller that splits S steps divides each loss by S.
        """
        keep = torch.as_tensor(list(positions), dtype=torch.long)
        names = ("latents", "next_latents", "step_mean", "log_prob")
        changes = {name: getattr(self, name)[:, keep.to(getattr(self, name).device)] for name in names}
        return dataclasses.replace(self, step_index=self.step_index[keep.to(self.step_index.device)], **changes)

    def to(self, device: torch.device | str) -> Self:
        """Move every tensor (conditioning included) to ``device``; the schedule stays on the CPU."""
        changes = {name: getattr(self, name).to(device) for name in self._BATCHED if getattr(self, name) is not None}
        return dataclasses.replace(self, **changes)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join along the batch.

        Raises:
            ValueError: ``parts`` is empty, or image size, schedule, noise steps or noise level differ.
        """
        if not parts:
            raise ValueError("RolloutRecord.cat needs at least one record")
        first = parts[0]
        if len(parts) == 1:
            return first
        for name in cls._SHARED:
            _cat_field(f"RolloutRecord.{name}", [getattr(part, name) for part in parts], shared=True)
        changes: dict[str, Any] = {}
        for name in cls._BATCHED:
            values = [getattr(part, name) for part in parts]
            changes[name] = type(values[0]).cat(values) if name == "conditioning" else _cat_field(name, values)
        return dataclasses.replace(first, **changes)


def _as_index(index: torch.Tensor | Sequence[int] | slice, device: torch.device) -> torch.Tensor | slice:
    if isinstance(index, slice):
        return index
    return torch.as_tensor(index, device=device)


def _cat_field(name: str, values: list[Any], shared: bool = False) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and not shared:
        shapes = {None if value is None else tuple(value.shape[1:]) for value in values}
        if len(shapes) > 1:
            raise ValueError(f"cannot join {name}: the parts have shapes {[getattr(v, 'shape', None) for v in values]}")
        return torch.cat(values)
    for value in values[1:]:
        same = torch.equal(first, value) if isinstance(first, torch.Tensor) else first == value
        if not same:
            raise ValueError(
                f"cannot join {name}: {first} and {value} differ (group samples by size and schedule first)"
            )
    return first
