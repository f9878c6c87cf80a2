"""A device that computes only shapes, and counts what a program would compute and store.

``FakeDevice`` counts bytes and FLOPs. ``fake_cpu`` is what estimate.py uses: PyTorch's own forward
and backward, in the data types of CUDA's autocast. The tests count the same on fake CUDA tensors
(tests/gpu/fake_gpu.py).
"""

import contextlib
import pkgutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_FLOPS = dict(flop_registry)
for _name in ("", "_backward"):
    _on_cpu = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{_name}")
    _FLOPS[_on_cpu] = flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention{_name}")]


class FakeDevice(TorchDispatchMode):
    """Inside it, operations on fake tensors compute shapes alone, and all others run for real.

    The device is the CPU, so that integers by which models decide what they compute (tokens, sizes
    of pictures, masks) are real.
    """

    kind = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = self.peak = 0  # bytes of the fake tensors that exist, and their maximum
        self.flops = 0  # of matrix products, convolutions and attention
        # Bytes of each storage, 0 of those that are not counted.
        self.sizes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors_of(args, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return self.compute_shapes(func, args, kwargs)

    def compute_shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The fake result of an operator; its bytes and FLOPs are counted."""
        if func is aten._local_scalar_dense.default:
            return 1e-6 if args[0].is_floating_point() else 1
        if func is aten.index.Tensor:
            # A mask whose values are known selects a known number of rows.
            args = args[0], [rows for index in args[1] for rows in _rows(index)]
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors_of(args, kwargs)):
            args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        out = self.mode.dispatch(func, (), args, kwargs)  # as inside the mode, and faster
        packet = func._overloadpacket
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._count(tensor)
        return out

    def _count(self, tensor: FakeTensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.fake_device.type == self.kind and storage not in self.sizes:
            self.sizes[storage] = [0]
            weakref.finalize(storage, self.resize, self.sizes[storage], 0)
            self.resize(self.sizes[storage], storage.nbytes())

    def resize(self, size: list[int], num_bytes: int) -> None:
        """Count ``num_bytes`` for a storage, instead of its present ``size``."""
        self.live -= size[0]
        size[0] = -(-num_bytes // 512) * 512  # CUDA's allocator rounds up
        self.live += size[0]
        self.peak = max(self.peak, self.live)

    def _faked(self, tensor: torch.Tensor) -> FakeTensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            return self.mode.from_tensor(tensor.detach())


def tensors_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of an operator, also those in lists."""
    tensors = []
    for value in (*args, *kwargs.values()):
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, torch.Tensor):
                tensors.append(part)
    return tensors


def _rows(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """The rows that a real mask selects; otherwise ``index``."""
    if index is None or isinstance(index, FakeTensor) or index.dtype != torch.bool:
        return [index]
    with unset_fake_temporarily():
        return index.nonzero().unbind(1)


# What CUDA's autocast computes in float32, and the CPU's does not.
_FLOAT32 = [
    f"torch.nn.functional.{name}" for name in ("layer_norm", "rms_norm", "group_norm", "softmax")
]
for _name in ("pow", "rsqrt", "softmax", "sum"):
    _FLOAT32 += [f"torch.{_name}", f"torch.Tensor.{_name}"]


def _float_if_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _in_float32(function: Callable) -> Callable:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tree_map_only(torch.Tensor, _float_if_bf16, args)
        return function(*args, **kwargs)

    return compute


_numpy = torch.Tensor.numpy


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """``Tensor.numpy``, zeros of a fake tensor."""
    if isinstance(tensor, FakeTensor):
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return _numpy(tensor)


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside the block, the CPU's autocast computes in the data types of CUDA's."""
    with contextlib.ExitStack() as stack:
        for target in _FLOAT32:
            stack.enter_context(mock.patch(target, _in_float32(pkgutil.resolve_name(target))))
        yield


@contextlib.contextmanager
def fake_cpu(device: FakeDevice) -> Iterator[None]:
    """Inside the block, operations on fake tensors of the CPU compute nothing.

    Their data types are those of CUDA's autocast.
    """
    with cuda_autocast(), mock.patch("torch.Tensor.numpy", numpy_of), device:
        yield


def place(module: nn.Module, device: FakeDevice, on: str) -> None:
    """Replace the tensors on ``meta`` by fake ones that are not counted.

    Parameters and buffers are on ``on`` then, other tensors on the CPU.
    """
    fakes: dict[int, Any] = {}  # a tensor may have several names

    def fake(tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The stand-in of a meta tensor; another tensor itself."""
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in fakes:
            with _disable_current_modes(), device.mode:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
            device.sizes[empty.untyped_storage()] = [0]
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            fakes[id(tensor)] = empty
        return fakes[id(tensor)]

    for part in module.modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    value[key] = None if tensor is None else fake(tensor, on)
            elif isinstance(value, (torch.Tensor, list)):  # tables of positions
                vars(part)[name] = tree_map_only(torch.Tensor, lambda t: fake(t, "cpu"), value)


class Measured(NamedTuple):
    """What a piece of work returns and costs."""

    result: Any
    flops: int
    peak: int  # bytes above what existed before


def measured(device: FakeDevice, function: Callable[[], Any]) -> Measured:
    """Run ``function`` and return what ``device`` counted meanwhile."""
    live = device.live
    flops = device.flops
    device.peak = live
    result = function()
    return Measured(result, device.flops - flops, device.peak - live)
