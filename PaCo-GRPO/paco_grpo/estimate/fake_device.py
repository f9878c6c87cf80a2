"""Devices that compute shapes alone: what a program would do and hold on a GPU, without a GPU and
without weights.

``FakeDevice`` counts bytes, FLOPs and operators. ``fake_cuda`` makes PyTorch believe in a GPU, with
its autocast and its refusals (tensors on two devices, wrong data types). ``fake_cpu`` is for the
backward pass, because PyTorch's own autograd works with its tensors.

The tests' pretended GPU (``tests/pretend_cuda.py``) is another mechanism, because its tensors hold
real numbers on the CPU under a label, whereas these are on CUDA for PyTorch itself and hold none:
beyond four functions of ``torch.cuda`` there would be nothing to share.
"""

import contextlib
import pkgutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_FLOPS = dict(flop_registry)
for _name in ("", "_backward"):
    _on_cpu = getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{_name}")
    _FLOPS[_on_cpu] = flop_registry[getattr(aten, f"_scaled_dot_product_flash_attention{_name}")]


class FakeDevice(TorchDispatchMode):
    """Inside it, operations on fake tensors compute shapes alone.

    So do those that create tensors on CUDA. All others run for real.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind  # of the device whose tensors are counted
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = self.peak = 0  # bytes of the fake tensors that exist, and their maximum
        self.flops = 0  # of matrix products, convolutions and attention
        self.operators = 0  # that compute; a view only describes other memory
        self.seen: weakref.WeakSet = weakref.WeakSet()  # storages that are counted, or need not be

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fake = [t for t in tensors if isinstance(t, FakeTensor)]
        if not fake and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            known = _known(args[0])
            if known is None:
                return 1e-6 if args[0].is_floating_point() else 1
            with unset_fake_temporarily():
                return known.item()
        values = _values(func, tensors, args, kwargs)
        to_cpu = func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if to_cpu and fake and fake[0].fake_device.type == "cuda":  # what comes back is real
            with unset_fake_temporarily():
                zeros = torch.zeros(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype))
                return zeros if values is None else values
        if func is aten.index.Tensor:
            # A mask whose values are known selects a known number of rows.
            args = args[0], [rows for index in args[1] for rows in _rows(index)]
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        with self.mode:
            if values is not None and torch.Tag.dynamic_output_shape in func.tags:
                device = fake[0].fake_device

                def empty(value: torch.Tensor) -> torch.Tensor:
                    return torch.empty(value.shape, dtype=value.dtype, device=device)

                out = tree_map_only(torch.Tensor, empty, values)
            else:
                out = func(*args, **kwargs)
        self.operators += not func.is_view
        packet = func._overloadpacket
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=out)
        results = [t for t in tree_leaves(out) if isinstance(t, FakeTensor)]
        for tensor in results:
            storage = tensor.untyped_storage()
            if tensor.fake_device.type == self.kind and storage not in self.seen:
                size = -(-storage.nbytes() // 512) * 512  # CUDA's allocator rounds up
                self.seen.add(storage)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, size)
        if values is not None:
            for tensor, value in zip(results, tree_leaves(values), strict=True):
                tensor.known = value
        return out

    def _faked(self, tensor: torch.Tensor) -> FakeTensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        with unset_fake_temporarily():
            return self.mode.from_tensor(tensor.detach())

    def _free(self, size: int) -> None:
        self.live -= size


def _known(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return getattr(tensor, "known", None) if isinstance(tensor, FakeTensor) else tensor


def _rows(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """The rows that a mask selects, if its values are known; otherwise ``index``."""
    known = _known(index)
    if known is None or known.dtype != torch.bool:
        return [index]
    with unset_fake_temporarily():
        return known.nonzero().unbind(1)


def _values(func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The result of ``func`` if it follows from known integers, else None.

    Models decide by such integers, sizes of pictures and masks, what they compute.
    """
    known = {id(t): _known(t) for t in tensors}
    if not all(v is not None and not v.is_floating_point() for v in known.values()):
        if func._schema.is_mutable and tensors:
            tensors[0].known = None
        return None
    if not tensors and func._overloadpacket is not aten.arange:
        return None
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(torch.Tensor, lambda t: known[id(t)], (args, kwargs))
        out = func(*args, **kwargs)
    return None if any(v.is_floating_point() for v in tree_leaves(out)) else out


def _attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """``scaled_dot_product_attention`` as CUDA computes it.

    That is under autocast, with one data type, by a fused kernel.
    """
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(low) if t.is_floating_point() else t for t in (query, key, value))
    dtypes = (query.dtype, key.dtype, value.dtype)
    if len(set(dtypes)) > 1:
        raise RuntimeError(f"query, key and value must have one dtype, not {dtypes}")
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            attn_mask.logical_not(), -torch.inf
        )
    attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and query.requires_grad
    attention = aten._scaled_dot_product_efficient_attention
    return attention(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0]


@contextlib.contextmanager
def fake_cuda(device: FakeDevice) -> Iterator[None]:
    """Inside the block CUDA exists and computes nothing; its autocast is active."""
    make_tensor = torch.tensor

    def of_numbers(data: Any, **kwargs: Any) -> torch.Tensor:
        """A list of CUDA tensors would look for the driver."""
        if isinstance(data, list):
            data = [x.item() if isinstance(x, torch.Tensor) else x for x in data]
        return make_tensor(data, **kwargs)

    patches = {
        "torch.cuda.is_available": lambda: True,
        # Autocast would switch itself off.
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda *args, **kwargs: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.empty_cache": lambda: None,
        "torch.tensor": of_numbers,
        "torch.Tensor.pin_memory": lambda tensor, *args: tensor,
        "torch.nn.functional.scaled_dot_product_attention": _attention,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(device.mode)  # first: it looks whether CUDA is there
        for target, replacement in patches.items():
            stack.enter_context(mock.patch(target, replacement))
        stack.enter_context(device)
        yield


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


@contextlib.contextmanager
def fake_cpu(device: FakeDevice) -> Iterator[None]:
    """Inside the block, operations on fake tensors of the CPU compute nothing.

    PyTorch's own autograd works with them.
    """
    with contextlib.ExitStack() as stack:
        for target in _FLOAT32:
            stack.enter_context(mock.patch(target, _in_float32(pkgutil.resolve_name(target))))
        stack.enter_context(device)
        yield


def place(module: nn.Module, device: FakeDevice, on: str) -> None:
    """Replace the tensors on ``meta`` by fake ones that are not counted.

    Parameters and buffers are on ``on`` then, other tensors on the CPU. It is called outside
    ``device``'s block.
    """
    fakes: dict[int, Any] = {}  # a tensor may have several names

    def fake(tensor: torch.Tensor, where: str) -> torch.Tensor:
        with device.mode:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
        device.seen.add(empty.untyped_storage())
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty

    for part in module.modules():
        for tensors, where in ((part._parameters, on), (part._buffers, on), (vars(part), "cpu")):
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = fake(tensor, where)
                    tensors[name] = fakes[id(tensor)]


class Measured(NamedTuple):
    """What a piece of work returns and costs."""

    result: Any
    flops: int
    operators: int
    peak: int  # bytes above what existed before


def measured(device: FakeDevice, function: Callable[[], Any]) -> Measured:
    """Run ``function`` and return what ``device`` counted meanwhile."""
    live = device.live
    flops = device.flops
    operators = device.operators
    device.peak = live
    result = function()
    return Measured(
        result=result,
        flops=device.flops - flops,
        operators=device.operators - operators,
        peak=device.peak - live,
    )
