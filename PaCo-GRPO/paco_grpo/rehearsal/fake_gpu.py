"""A GPU that computes nothing: tensors on it have sizes, data types and a device (PyTorch's FakeTensorMode), and no values.

Code runs as it is. What it does on the fake device is checked (devices, data types under CUDA's own autocast lists, shapes)
and counted (``Meter``): kernels, bytes, casts, FLOPs, and live memory. Small tensors on the CPU stay real, so schedules,
seeds and pictures have their values; a value read from the device is invented by ``FakeGPU.value``.

PyTorch's C++ autograd engine needs a CUDA driver for such tensors, so ``backward`` walks the graph in Python.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.flop_counter import flop_registry

logger = logging.getLogger(__name__)

DEVICE = torch.device("cuda", 0)
BLOCK = 512  # bytes; CUDA's caching allocator rounds up to it
aten = torch.ops.aten
_LARGEST_KNOWN = 1 << 25  # elements: Qwen2.5-VL's mask of image tokens has thousands by its width
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COUNTING = (aten.arange.default, aten.arange.start, aten.arange.start_step)
# Operations that only describe memory, or are no kernel of their own.
_NO_KERNEL = {
    aten._unsafe_view, aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.detach, aten.lift_fresh,
    aten._local_scalar_dense, aten.set_, aten.resize_, aten.is_same_size, aten.sym_size, aten.record_stream,
}  # fmt: skip


@dataclass
class Counts:
    """What was launched on the device.

    Attributes:
        kernels: Operations that compute or copy; views are none.
        bytes: Read and written outside matrix products, convolutions and attention.
        casts: Kernels that only change the data type, and ``cast_bytes`` of ``bytes``.
        flops: Of matrix products, convolutions and attention; a multiply-add is two.
        to_device: Bytes copied from main memory.
    """

    kernels: int = 0
    bytes: int = 0
    casts: int = 0
    cast_bytes: int = 0
    flops: int = 0
    to_device: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(**{name: value - getattr(other, name) for name, value in vars(self).items()})

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def times(self, factor: float) -> Counts:
        """``factor`` such pieces of work."""
        return Counts(**{name: round(value * factor) for name, value in vars(self).items()})


@dataclass
class Phase:
    """One kind of work, without the kinds within it: the counts of each call, and the most bytes alive while it ran."""

    calls: list[Counts] = field(default_factory=list)
    peak: int = 0

    @property
    def counts(self) -> Counts:
        """Of all calls."""
        return sum(self.calls, Counts())


class Meter:
    """Live bytes on the fake device, and counts and peaks by phase (the innermost ``phase`` block gets them)."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.phases: dict[str, Phase] = {}
        self._counts = [Counts()]  # of the phases that run
        self._stack = [self.phases.setdefault("build", Phase(list(self._counts)))]
        self._names = ["build"]
        self._known: dict[int, weakref.finalize] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Work inside the block belongs to ``name``, within the phase around it."""
        outer = self._names[-1]
        full = name if outer == "build" else f"{outer} / {name}"
        found = self.phases.setdefault(full, Phase())
        found.calls.append(Counts())
        self._counts.append(found.calls[-1])
        self._stack.append(found)
        self._names.append(full)
        self._note_peak(self.now)
        try:
            yield found
        finally:
            self._counts.pop()
            self._stack.pop()
            self._names.pop()

    def during(self, name: str, function: Callable) -> Callable:
        """``function`` as a phase."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def add(self, one: Counts | None) -> None:
        """Add what ``counted`` gave for an operation."""
        if one is not None:
            values, counts = vars(one), vars(self._counts[-1])
            for name in values:
                counts[name] += values[name]

    def follow(self, result: Any) -> None:
        """Count the storages of ``result`` on the device until they die."""
        for tensor in _tensors((result,)):
            if _device(tensor) == DEVICE:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    size = -(-storage.nbytes() // BLOCK) * BLOCK
                    self.now += size
                    self._known[storage._cdata] = weakref.finalize(storage, self._remove, storage._cdata, size)
                    self._note_peak(self.now)

    def _note_peak(self, now: int) -> None:
        self.peak = max(self.peak, now)
        for phase in self._stack[-1:]:
            phase.peak = max(phase.peak, now)

    def _remove(self, key: int, size: int) -> None:
        if self._known.pop(key, None) is not None:
            self.now -= size


def counted(func: Any, args: Any, kwargs: Any, result: Any) -> Counts | None:
    """What one operation does on the device."""
    packet = func._overloadpacket
    if packet in _NO_KERNEL or func.is_view or func.namespace == "prim":
        return None
    tensors, made = _tensors((*args, *kwargs.values())), _tensors((result,))
    on_device = [t for t in (*tensors, *made) if _device(t) == DEVICE]
    if not on_device:
        return None
    if func is aten._to_copy.default and _device(made[0]) != _device(tensors[0]):
        return Counts(to_device=made[0].nbytes) if _device(made[0]) == DEVICE else None
    if packet in flop_registry:
        return Counts(kernels=1, flops=flop_registry[packet](*args, **kwargs, out_val=result))
    moved = sum(map(_touched, on_device))
    if not made:  # in place, on lists: written as well
        moved += sum(map(_touched, tensors))
    if func is aten._to_copy.default and made[0].dtype != tensors[0].dtype:
        return Counts(kernels=1, bytes=moved, casts=1, cast_bytes=moved)
    return Counts(kernels=1, bytes=moved)


def _device(tensor: torch.Tensor) -> torch.device:
    """Without asking PyTorch, which would be another operation."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, which nest lists at most."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _touched(tensor: torch.Tensor) -> int:
    """Bytes behind the distinct elements of ``tensor``."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else 1
    return distinct * tensor.element_size()


class _Dispatch(TorchDispatchMode):
    """Runs what touches the device on fake tensors, and the rest for real."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which costs a wrapper around each operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """See TorchDispatchMode."""
        if func is _PRIM_DEVICE:
            return _device(args[0])
        kwargs = kwargs or {}
        key = _key(func, args, kwargs)
        if key is not None and (seen := _SEEN.get(key)) is not None:
            counts, recipe = seen
            self.gpu.meter.add(counts)
            result = _repeated(recipe, _tensors((*args, *kwargs.values())), self.gpu.mode)
            if recipe is not None:
                self.gpu.meter.follow(result)
            return result
        tensors = _tensors((*args, *kwargs.values()))
        device = kwargs.get("device")
        fakes = sum(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not (fakes or self.gpu.all_fake or (device is not None and torch.device(device).type == "cuda")):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.gpu.value(args[0])
        known, values = _known_result(func, tensors, args, kwargs)
        if func is aten.index.Tensor:  # a mask whose values are known gives a known number of rows
            args = args[0], [rows for index in args[1] for rows in _rows(index)]
        if fakes < len(tensors):
            args, kwargs = tree_map_only(torch.Tensor, self.gpu.faked, (args, kwargs))
        if known and torch.Tag.dynamic_output_shape in func.tags:
            on = next((t.device for t in tensors if isinstance(t, FakeTensor)), DEVICE)
            result = tree_map_only(torch.Tensor, lambda t: torch.empty_like(self.gpu.faked(t), device=on), values)
        else:
            result = func(*args, **kwargs)
        counts = counted(func, args, kwargs, result)
        self.gpu.meter.add(counts)
        self.gpu.meter.follow(result)
        if key is not None and (recipe := _recipe(result, tensors)) is not _NO_RECIPE:
            _SEEN[key] = counts, recipe
        if known:
            for made, value in zip(_tensors((result,)), _tensors((values,)), strict=True):
                made.known = value
        return result


# --- operations of a kind that was seen before, such as those of the second block: five times as fast as PyTorch's own cache


_SEEN: dict[tuple, tuple[Counts | None, Any]] = {}  # of _key; what it does, and its _recipe
_NO_RECIPE = object()
_PRIM_DEVICE = torch.ops.prim.device.default
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format)


def _key(func: Any, args: Any, kwargs: Any) -> tuple | None:
    """All that the result of ``func`` depends on; None unless every tensor is on the device and without known values."""
    if torch.Tag.inplace_view in func.tags:
        return None
    found: list[Any] = [func]
    on_device = _describe(args, found)
    for name, value in kwargs.items():
        found.append(name)
        inner = _describe((value,), found)
        on_device = None if on_device is None or inner is None else on_device or inner
    return tuple(found) if on_device else None


def _describe(values: Any, found: list[Any]) -> bool | None:
    """Append what ``values`` are; whether a tensor is among them, None for one that has to run."""
    any_tensor: bool | None = False
    for value in values:
        if isinstance(value, FakeTensor):
            if value.fake_device != DEVICE or value.dtype.is_complex or getattr(value, "known", None) is not None:
                return None
            found.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
            any_tensor = True
        elif isinstance(value, _PLAIN):
            found.append((type(value), value))
        elif isinstance(value, (list, tuple)):
            found.append((type(value), len(value)))
            inner = _describe(value, found)
            if inner is None:
                return None
            any_tensor = any_tensor or inner
        elif isinstance(value, torch.device) and value.type == "cuda":
            found.append(value.type)
        else:
            return None
    return any_tensor


def _recipe(result: Any, tensors: list[torch.Tensor]) -> Any:
    """How ``_repeated`` makes this result from other tensors of the same kinds; _NO_RECIPE if it cannot."""
    if result is None:
        return None
    if isinstance(result, (list, tuple)):
        parts = [_recipe(part, tensors) for part in result]
        return _NO_RECIPE if _NO_RECIPE in parts else (type(result), parts)
    if not isinstance(result, FakeTensor) or result.fake_device != DEVICE or result.dtype.is_complex:
        return _NO_RECIPE
    for i, tensor in enumerate(tensors):
        if tensor is result:
            return i
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    mine = result.untyped_storage()._cdata
    source = storages.index(mine) if mine in storages else None
    return [source, result.shape, result.stride(), result.dtype, result.storage_offset()]


def _repeated(recipe: Any, tensors: list[torch.Tensor], mode: FakeTensorMode) -> Any:
    if recipe is None:
        return None
    if isinstance(recipe, int):
        return tensors[recipe]
    if isinstance(recipe, tuple):
        return recipe[0](_repeated(part, tensors, mode) for part in recipe[1])
    source, shape, stride, dtype, offset = recipe
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if source is not None:
            made.set_(tensors[source].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, made, DEVICE)


# --- values that are known --------------------------------------------------------------------------------------------


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of integers and truth values that came from the CPU, None for any other tensor of the device."""
    return getattr(tensor, "known", None) if isinstance(tensor, FakeTensor) else tensor


def _known_result(func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whether the result follows from known integers, and its values: sizes of pictures decide what a model computes."""
    values = [_known(tensor) for tensor in tensors]
    small = all(v is not None and not v.is_floating_point() and v.numel() <= _LARGEST_KNOWN for v in values)
    floats = kwargs.get("dtype") in _FLOATS or (not tensors and kwargs.get("dtype") is None and func not in _COUNTING)
    if not small or floats:
        if func._schema.is_mutable and tensors and hasattr(tensors[0], "known"):
            tensors[0].known = None
        return False, None
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(torch.Tensor, _known, (args, kwargs))
        result = func(*args, **kwargs)
    found = _tensors((result,))
    known = bool(found) and not any(v.is_floating_point() or v.numel() > _LARGEST_KNOWN for v in found)
    return known, result


def _rows(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """A mask of known values as the numbers of its rows, columns, …; any other index as it is."""
    value = None if index is None else _known(index)
    if value is None or value.dtype != torch.bool:
        return [index]
    with unset_fake_temporarily():
        numbers = list(value.nonzero().unbind(1))
    made = [torch.empty(len(rows), dtype=torch.long, device=index.device) for rows in numbers]
    for fake, rows in zip(made, numbers, strict=True):
        fake.known = rows
    return made


class FakeGPU:
    """Inside the block, ``cuda:0`` exists and computes nothing.

    Args:
        memory: Bytes that the device has.

    Attributes:
        meter: What happened on it.
        all_fake: New tensors on the CPU are fake, too (large weights).
    """

    def __init__(self, memory: int = 80 * 2**30) -> None:
        self.memory = memory
        self.meter = Meter()
        self.all_fake = False
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # PyTorch lists the functions that a default device applies to once, and must not keep ``torch.tensor``'s stand-in:
        # transformers would leave buffers of models that are loaded later without values.
        _device_constructors()
        enter = self._stack.enter_context
        enter(self.mode)  # first: it looks whether CUDA is there
        for target, replacement in self._patches().items():
            enter(mock.patch(target, replacement))
        fake_data = property(torch.Tensor.data.__get__, _set_data)
        enter(mock.patch.object(FakeTensor, "data", fake_data, create=True))
        enter(mock.patch.object(FakeTensor, "numpy", _numpy, create=True))
        enter(_Dispatch(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _patches(self) -> dict[str, Any]:
        """What PyTorch asks the driver, answered for a device that is there; and what only the driver could do."""
        meter, nothing = self.meter, lambda *args, **kwargs: None
        return {
            # autocast switches itself off without these
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
            "torch.cuda.is_bf16_supported": lambda *args, **kwargs: True,
            "torch.cuda.get_device_capability": lambda *args: (9, 0),
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_rng_state_all": list,
            "torch.cuda.manual_seed_all": nothing,
            "torch.cuda.synchronize": nothing,
            "torch.cuda.empty_cache": nothing,
            "torch.cuda.reset_peak_memory_stats": lambda *args: setattr(meter, "peak", meter.now),
            "torch.cuda.max_memory_allocated": lambda *args: meter.peak,
            "torch.cuda.memory_allocated": lambda *args: meter.now,
            "torch.cuda.memory_reserved": lambda *args: meter.now,
            "torch.cuda.mem_get_info": lambda *args: (self.memory - meter.now, self.memory),
            "torch.cuda.Stream": lambda *args, **kwargs: mock.MagicMock(),
            "torch.cuda.stream": lambda *args: contextlib.nullcontext(),
            "torch.cuda.current_stream": lambda *args: mock.MagicMock(),
            "torch.tensor": functools.partial(_tensor, torch.tensor),
            "torch.Tensor.pin_memory": lambda tensor, *args: tensor,
            "torch.Tensor.record_stream": nothing,
            "torch.Tensor.backward": lambda tensor, *args, **kwargs: self.backward(tensor),
            "torch.autograd.backward": self.backward,
            "torch.utils.swap_tensors": _set_data,  # behind nn.Module.to
            "torch.nn.functional.scaled_dot_product_attention": attention,
        }

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Everything made inside is fake, also on the CPU."""
        self.all_fake = True
        try:
            yield
        finally:
            self.all_fake = False

    def faked(self, tensor: torch.Tensor) -> FakeTensor:
        """``tensor`` without its values; what the CPU keeps of it is not counted."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            copy = tensor.detach()
        made = self.mode.from_tensor(copy)
        return made

    def value(self, tensor: torch.Tensor) -> float | int | bool:
        """What reading a tensor of the device gives: its value if that is known, true, one, or a small positive number."""
        if (known := _known(tensor)) is not None:
            with unset_fake_temporarily():
                return known.item()
        if tensor.dtype == torch.bool:
            return True
        return 1e-6 if tensor.is_floating_point() else 1

    def backward(self, tensors: torch.Tensor | Sequence[torch.Tensor], gradients: Any = None, **_: Any) -> None:
        """As ``torch.autograd.backward``: the same nodes in the same order, saved tensors freed as they are used.

        Reentrant gradient checkpointing calls it within itself.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        gradients = [gradients] if gradients is None or isinstance(gradients, torch.Tensor) else list(gradients)
        nested = torch._C._get_graph_exec_group() is not None
        with torch.no_grad(), contextlib.nullcontext() if nested else GraphExecGroup():
            _walk(tensors, [torch.ones_like(t) if g is None else g for t, g in zip(tensors, gradients, strict=True)])

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Around forwards whose ``backward`` comes: what autograd saves is freed node by node."""
        with torch.autograd.graph.saved_tensors_hooks(_Saved, _Saved.take):
            yield


_TAKEN: list[_Saved] = []  # by the node that runs


class _Saved:
    """A tensor saved for the backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def take(self) -> torch.Tensor:
        """The tensor; after its node has run it is freed."""
        _TAKEN.append(self)
        return self.tensor


def _walk(tensors: list[torch.Tensor], rows_given: list[torch.Tensor]) -> None:
    gradients: dict[Any, dict[int, torch.Tensor]] = {}
    for tensor, gradient in zip(tensors, rows_given, strict=True):
        gradients.setdefault(tensor.grad_fn, {})[tensor.output_nr] = gradient
    waiting: Counter = Counter()
    nodes, seen = list(gradients), set(gradients)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is not None:
                waiting[node] += 1
                if node not in seen:
                    seen.add(node)
                    nodes.append(node)
    del nodes, seen
    ready = [(-root._sequence_nr(), -i, root) for i, root in enumerate(gradients) if not waiting[root]]
    heapq.heapify(ready)
    number = 0
    while ready:
        _, _, node = heapq.heappop(ready)
        given = gradients.pop(node, {})
        if hasattr(node, "variable"):
            _accumulate(node.variable, given.get(0))
            continue
        metas = node._input_metadata
        made: Any = (None,) * len(node.next_functions)
        if given:
            rows = [_fitted(given.get(i), meta) for i, meta in enumerate(metas)]
            made = node.apply(*rows) if hasattr(node, "apply") else node(*rows)
            made = made if isinstance(made, tuple) else (made,)
            del rows
        del given
        for saved in _TAKEN:
            saved.tensor = None
        _TAKEN.clear()
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        # a function of Python returns something for each argument, also for those that are no tensors
        needed = getattr(node, "needs_input_grad", None) or [edge[0] is not None for edge in node.next_functions]
        made = [gradient for gradient, wanted in zip(made, needed, strict=False) if wanted]
        for (target, slot), gradient in itertools.zip_longest(edges, made):
            if gradient is not None:
                slots = gradients.setdefault(target, {})
                slots[slot] = slots[slot] + gradient if slot in slots else gradient
            waiting[target] -= 1
            if not waiting[target]:
                number += 1
                heapq.heappush(ready, (-target._sequence_nr(), number, target))
        del made


def _fitted(gradient: torch.Tensor | None, meta: Any) -> torch.Tensor | None:
    """As the engine makes a gradient fit its node's output: summed over broadcast sizes, cast, on the same device."""
    if gradient is None:
        return None
    if gradient.device != meta.device:
        raise RuntimeError(f"a gradient is on {gradient.device}, its tensor on {meta.device}")
    if tuple(gradient.shape) != tuple(meta.shape):
        gradient = gradient.sum_to_size(*meta.shape)
    return gradient if gradient.dtype == meta.dtype else gradient.to(meta.dtype)


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    gradient = _fitted(gradient, parameter)
    if parameter.grad is None:
        parameter.grad = gradient.detach()
    else:
        parameter.grad.add_(gradient)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """``scaled_dot_product_attention`` as CUDA computes it: autocast, the same checks, and a fused kernel."""
    if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(low) if t.is_floating_point() else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(low)
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype}, key.dtype: {key.dtype}, and value.dtype: {value.dtype} instead."
        )
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
    )[0]


def _tensor(make: Callable, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor`` without asking the driver: made on the CPU, then copied."""
    if not isinstance(data, torch.Tensor):
        data = tree_map_only(FakeTensor, lambda t: t.item(), data)
    made = make(data, **kwargs)
    return made if device is None else made.to(DEVICE if torch.device(device).type == "cuda" else device)


def _set_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """``tensor.data = other`` with its device."""
    torch.Tensor.data.__set__(tensor, other)
    if isinstance(tensor, FakeTensor):
        tensor.fake_device = other.device


def _numpy(tensor: torch.Tensor, **_: Any):
    """Known values, else zeros: pixels are black."""
    with unset_fake_temporarily():
        if (known := _known(tensor)) is not None:
            return known.numpy()
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype).numpy()
