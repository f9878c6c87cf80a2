"""A PyTorch program on a CPU as if it had a GPU: what a GPU refuses because of where a tensor is, fails here too.

    python tests/pretend_cuda.py SCRIPT [ARGUMENT …]        # or -m MODULE; PRETENDED_GPUS=2 under torchrun
    with pretended_gpu(): …                                 # in a test's own process

A storage is on the CPU or on "cuda:i", whatever view, parameter or ``.data`` shows it; its bytes are always on the CPU.
Refused, as on a GPU: operands on two devices (a CPU scalar and CPU indices are fine), ``numpy()`` of a GPU tensor, a
generator of another device, a CPU tensor in a collective of nccl, a GPU that does not exist, and reading a copy made with
``non_blocking=True`` before any synchronization. A copy between devices never shares memory. Results are the CPU's, bit
for bit, unless the program itself computes differently on a GPU. Speed, memory, kernels, rounding, compilation and
real streams are not shown.
"""

import contextlib
import os
import runpy
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # it maps the functions of torch when it is imported: the real ones
import torch.distributed as dist
import torch.nn.attention
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
# Functions that take tensors of several devices.
_MIXING = {
    "copy_", "_foreach_copy_", "set_", "backward", "is_same_size", "swap_tensors", "_has_compatible_shallow_copy_type",
}  # fmt: skip
_MOVING = {"to", "cuda", "cpu", "type_as", "as_tensor", "asarray"}
_INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
_real_device = torch.Tensor.device.__get__
_devices = weakref.WeakKeyDictionary()  # storage on a GPU → its device
_unfinished = weakref.WeakSet()  # CPU storages that a copy may still be writing to
_current = SimpleNamespace(index=0, count=1)


class RefusedByGPU(RuntimeError):
    """The program would have failed on a GPU, or read garbage there."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where ``tensor`` pretends to be."""
    device = _real_device(tensor)
    return _devices.get(_storage(tensor), device) if device.type == "cpu" else device


def _named(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    index = _current.index if device.index is None else device.index
    if index >= _current.count:
        raise RefusedByGPU(f"cuda:{index} does not exist (invalid device ordinal)")
    return torch.device("cuda", index)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor; inside ``torch.vmap``, of the tensor that is mapped over."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    tensors: list[torch.Tensor] = []
    for part in value:
        tensors += _tensors(part)
    return tensors


class _Following(TorchFunctionMode):
    """Follows the device of every tensor through every function of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            return self._attribute(func, *args)
        operands = _tensors([args, kwargs])
        _check_finished(name, operands)
        if name in _MOVING and args and isinstance(args[0], torch.Tensor):
            return _move(name, *args, **kwargs)
        if name == "pin_memory":
            return _pinned(args[0])
        if name in ("numpy", "__array__") and device_of(args[0]) != CPU:
            raise RefusedByGPU(f"{name}: can't convert a tensor of the GPU; use Tensor.cpu() first")
        if name in _INDEXING:
            _check_indices(name, *args)
        elif name not in _MIXING:
            _check_together(name, operands)
        target = _target(name, kwargs.get("device"), operands)
        _check_generator(name, kwargs.get("generator"), target)
        if target.type == "cuda":
            changes = {"device": CPU, "pin_memory": False}
            kwargs |= {key: changes[key] for key in changes if key in kwargs}
        result = func(*args, **kwargs)
        if name == "copy_" and device_of(args[0]) == CPU:
            _note_unfinished(
                result, operands[-1], (*args[2:], kwargs.get("non_blocking", False))[0]
            )
        if name == "get_device":
            return -1 if target == CPU else target.index
        if target.type == "cuda":
            _place(result, target, operands)
        return result

    @staticmethod
    def _attribute(func, tensor, *values):
        attribute = func.__self__.__name__
        if func.__name__ == "__get__" and attribute == "device":
            return device_of(tensor)
        if func.__name__ == "__get__" and attribute in ("is_cuda", "is_cpu"):
            return device_of(tensor).type == attribute.removeprefix("is_")
        if func.__name__ == "__set__" and attribute == "grad":
            _check_together("assigning a gradient", _tensors((tensor, values)))
        result = func(tensor, *values)
        if attribute == "grad" and result is not None:  # autograd made it out of this mode's sight
            _place(result, device_of(tensor), [])
        return result


def _target(name: str, device: Any, operands: list[torch.Tensor]) -> torch.device:
    """Where the result of a function is."""
    if device is not None:
        return _named(device)
    if name in _INDEXING or name in _MIXING:
        return device_of(operands[0])
    devices = [device_of(tensor) for tensor in operands]
    on_gpu = [device for device in devices if device.type == "cuda"]
    return (on_gpu or devices or [CPU])[0]


def _place(result: Any, device: torch.device, operands: list[torch.Tensor]) -> None:
    """Put what a function made on ``device``; views and operands are where they were."""
    known = {id(_storage(tensor)) for tensor in operands}
    for tensor in _tensors(result):
        storage = _storage(tensor)
        if device.type == "cuda" and id(storage) not in known and _real_device(tensor) == CPU:
            _devices[storage] = device


def _move(name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``, in all its forms."""
    if name in ("cuda", "cpu"):
        device, *args = args or (kwargs.pop("device", None),)
        args = (name if device is None or name == "cpu" else device, *args)
    copy = kwargs.pop("copy", False)
    like = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if like:
        rest = [value for value in args if value is not like[0]]
        kwargs.pop("other", None)
        args = (device_of(like[0]), like[0].dtype, *rest)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    source = device_of(tensor)
    target = source if device is None else _named(device)
    options = {} if memory_format is None else {"memory_format": memory_format}
    real = CPU if target.type == "cuda" else target
    options |= {"copy": copy or target != source}
    result = torch.Tensor.to(tensor, real, dtype or tensor.dtype, **options)
    if result is not tensor:
        _place(result, target, [])
    if target == CPU:
        _note_unfinished(result, tensor, non_blocking)
    return result


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    if device_of(tensor) != CPU:
        raise RefusedByGPU("only dense CPU tensors can be pinned")
    return tensor.clone()


def _note_unfinished(copy: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    if non_blocking and device_of(source).type == "cuda":
        _unfinished.add(_storage(copy))


def _finish_copies(*_: Any, **__: Any) -> None:
    _unfinished.clear()


def _check_finished(name: str, operands: list[torch.Tensor]) -> None:
    if _unfinished and any(_storage(tensor) in _unfinished for tensor in operands):
        raise RefusedByGPU(f"{name} reads a copy with non_blocking=True that may not be finished")


def _check_together(name: str, operands: list[torch.Tensor]) -> None:
    placed = [tensor for tensor in operands if tensor.dim() or device_of(tensor) != CPU]
    if len({device_of(tensor) for tensor in placed}) > 1:
        where = ", ".join(f"{device_of(tensor)} {tuple(tensor.shape)}" for tensor in placed[:6])
        raise RefusedByGPU(f"{name}: Expected all tensors to be on the same device, not {where}")


def _check_indices(name: str, base: torch.Tensor, index: Any, *values: Any) -> None:
    """Indices may be on the CPU; a value that they place may not."""
    indices = _tensors(index)
    _check_together(name, [base, *(tensor for tensor in indices if device_of(tensor) != CPU)])
    if indices:
        _check_together(name, [base, *_tensors(values)])


def _check_generator(name: str, generator: Any, target: torch.device) -> None:
    if generator is not None and generator.device.type != target.type:
        found = f"{target.type!r} device type for generator but found {generator.device.type!r}"
        raise RefusedByGPU(f"{name}: Expected a {found}")


# --- torch.cuda, autocast and nccl ------------------------------------------------------------------------------------


class _Generator(torch._C.Generator):
    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, device="cpu")
        generator.place = _named(device)
        return generator

    device = property(lambda self: self.place)


class _Stream:
    """A stream or an event: work is done when it is submitted, but a copy is finished only by a synchronization."""

    cuda_stream = stream_id = 0
    device = property(lambda self: _named("cuda"))
    synchronize = _finish_copies

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self if name == "record_event" else None

    def query(self):
        _finish_copies()
        return True

    def elapsed_time(self, end):
        return 1.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _no_context(*_: Any, **__: Any) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def _cuda() -> dict[str, Any]:
    """What replaces the attributes of torch.cuda."""
    properties = SimpleNamespace(
        name="Pretended GPU", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132, uuid="pretended",
    )  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)
    zero = dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
    )
    values = zero | {
        "is_available": True, "is_initialized": True, "device_count": _current.count, "get_device_name": properties.name,
        "get_device_capability": (9, 0), "get_device_properties": properties, "is_bf16_supported": True,
        "mem_get_info": (properties.total_memory, properties.total_memory), "memory_stats": {}, "initial_seed": 0,
        "get_rng_state": state, "get_rng_state_all": [state] * _current.count, "is_current_stream_capturing": False,
    }  # fmt: skip
    silent = (
        "init", "_lazy_init", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "seed",
        "seed_all", "set_rng_state", "set_rng_state_all",
    )  # fmt: skip
    replaced = {name: lambda *_, value=value, **__: value for name, value in values.items()}
    replaced |= dict.fromkeys(silent, _nothing)
    replaced |= dict.fromkeys(("stream", "device", "device_of", "_DeviceGuard"), _no_context)
    replaced |= dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), _Stream)
    return replaced | {
        "current_device": lambda: _current.index, "synchronize": _finish_copies,
        "set_device": lambda device: setattr(_current, "index", _named(device).index),
    }  # fmt: skip


def _autocast() -> dict[str, Any]:
    """The CPU computes in the precision of CUDA's autocast; autocast for the CPU is nothing to tensors of the GPU."""
    enabled, set_enabled, set_dtype = (
        torch.is_autocast_enabled, torch.set_autocast_enabled, torch.set_autocast_dtype,
    )  # fmt: skip

    def mirrored(setter):
        def set_both(device_type, value):
            if device_type == "cuda":
                setter("cuda", value)
                setter("cpu", value)

        return set_both

    return {
        "is_autocast_enabled": lambda kind="cuda": kind == "cuda" and enabled(kind),
        "set_autocast_enabled": mirrored(set_enabled),
        "set_autocast_dtype": mirrored(set_dtype),
    }


def _nccl() -> dict[str, Any]:
    """Groups of nccl are groups of gloo that refuse tensors of the CPU."""
    state = SimpleNamespace(backend=None)
    init, object_device = c10d.init_process_group, c10d._get_object_coll_device

    def init_process_group(name=None, *args, **kwargs):
        state.backend = kwargs.pop("backend", name)
        kwargs.pop("device_id", None)
        real = None if state.backend is None else state.backend.replace("nccl", "gloo")
        return init(real, *args, **kwargs)

    def guarded(collective, function):
        def call(*args, **kwargs):
            on_cpu = any(device_of(tensor) == CPU for tensor in _tensors((args, kwargs)))
            # Other groups may be of gloo.
            of_all = kwargs.get("group") in (None, dist.group.WORLD)
            if state.backend == "nccl" and of_all and on_cpu:
                raise RefusedByGPU(f"{collective}: No backend type associated with device type cpu")
            return function(*args, **kwargs)

        return call

    replaced = {name: guarded(name, getattr(c10d, name)) for name in _COLLECTIVES}
    return replaced | {
        "init_process_group": init_process_group,
        "_get_object_coll_device": lambda group=None: (
            f"cuda:{_current.index}" if state.backend == "nccl" else object_device(group)
        ),
    }


def _changes() -> dict[Any, dict[str, Any]]:
    """Owner → attributes that are replaced."""
    run_thread = threading.Thread.run

    def run(thread):
        with _Following():
            run_thread(thread)

    accelerator = {
        "is_available": lambda: True, "device_count": lambda: _current.count, "synchronize": _finish_copies,
        "current_accelerator": lambda *_, **__: torch.device("cuda"), "current_device_index": lambda: _current.index,
        "current_stream": _Stream, "empty_cache": _nothing,
    }  # fmt: skip
    nccl = _nccl()
    return {
        torch.cuda: _cuda(),
        torch.cuda.amp.common: {"amp_definitely_not_available": lambda: False},
        torch.accelerator: accelerator,
        torch: _autocast() | {"Generator": _Generator, "compile": _uncompiled},
        torch.nn.attention: {"sdpa_kernel": _no_context},
        torch.Tensor: {"record_stream": _nothing},
        c10d: nccl,
        dist: {name: value for name, value in nccl.items() if hasattr(dist, name)},
        threading.Thread: {"run": run},
    }


def _uncompiled(model: Any = None, **_: Any) -> Any:
    return (lambda function: function) if model is None else model


@contextlib.contextmanager
def pretended_gpu(count: int = 1) -> Iterator[None]:
    """Inside the block, the machine has ``count`` GPUs."""
    _current.count = count
    _current.index = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0
    with contextlib.ExitStack() as stack:
        for owner, attributes in _changes().items():
            for name, value in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_Following())
        yield
        _finish_copies()


def main() -> None:
    """Run the script or module of the command line."""
    sys.argv.pop(0)
    with pretended_gpu(int(os.environ.get("PRETENDED_GPUS", "1"))):
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
