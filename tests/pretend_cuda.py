"""A PyTorch program on a CPU as if it had a GPU: what a GPU refuses because of where a tensor is,
fails here too.

    python tests/pretend_cuda.py SCRIPT [ARGUMENT …]   # or -m MODULE; torchrun: PRETENDED_GPUS=2
    with pretended_gpu(): …                            # in a test's own process

A storage is on the CPU or on "cuda:i", whatever view, parameter or ``.data`` shows it; its bytes
are always on the CPU. Refused, as on a GPU: operands on two devices (a CPU scalar and CPU indices
are fine), ``numpy()`` of a GPU tensor, a generator of another device, a CPU tensor in a collective
of nccl, a GPU that does not exist, and reading a copy made with ``non_blocking=True`` before any
synchronization. A copy between devices never shares memory. Results are the CPU's, bit for bit,
unless the program itself computes differently on a GPU.

Two processes with nccl and FSDP2 run too. Speed, memory, kernels, rounding, compilation and real
streams are not shown. During a backward pass operands may be on two devices, because autograd makes
gradients where Python cannot see them.
"""

import contextlib
import inspect
import os
import runpy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # it maps the functions of torch when it is imported: the real ones
import torch.distributed as dist
import torch.nn.attention
import torch.utils.checkpoint
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}
_MOVING = {"to", "type_as", "as_tensor", "asarray"}
# Functions that take tensors of several devices.
_MIXING = {"copy_", "_foreach_copy_", "set_", "backward", "is_same_size", "swap_tensors"}
_MIXING |= {"_has_compatible_shallow_copy_type"}
_ONLY_ON_CPU = {"numpy", "__array__", "pin_memory"}

_devices = weakref.WeakKeyDictionary()  # storage on a GPU → its device
_unfinished = weakref.WeakSet()  # CPU storages that a copy may still be writing to
_current = SimpleNamespace(index=0, count=1)
_real_device = torch.Tensor.device.__get__


class RefusedByGPU(RuntimeError):
    """The program would have failed on a GPU, or read garbage there."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where ``tensor`` pretends to be."""
    device = _real_device(tensor)
    return _devices.get(_storage(tensor), device) if device.type == "cpu" else device


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, of a sharded one's part, of what ``torch.vmap`` maps over."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _named(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return device
    index = _current.index if device.index is None else device.index
    if index >= _current.count:
        raise RefusedByGPU(f"cuda:{index} does not exist (invalid device ordinal)")
    return torch.device("cuda", index)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    tensors: list[torch.Tensor] = []
    if isinstance(value, (list, tuple)):
        for part in value:
            tensors += _tensors(part)
    return tensors


class _Following(TorchFunctionMode):
    """Follows the device of every tensor through every function of torch."""

    def __init__(self, in_backward: bool = False) -> None:
        self.in_backward = in_backward

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.__name__
        if name in ("__get__", "__set__", "__delete__"):
            return self._attribute(func, *args)
        operands = _tensors((args, kwargs))
        if _unfinished and any(_storage(tensor) in _unfinished for tensor in operands):
            raise RefusedByGPU(f"{name} reads a copy with non_blocking=True that may be unfinished")
        if name in _ONLY_ON_CPU and device_of(args[0]) != CPU:
            raise RefusedByGPU(f"{name} is only for tensors of the CPU; use Tensor.cpu() first")
        if name == "pin_memory":
            return args[0].clone()
        if name in _MOVING and isinstance(args[0], torch.Tensor):
            return _move(*args, **kwargs)
        if name in _INDEXING:
            _check_indices(name, *args)
        elif name not in _MIXING and not self.in_backward:
            _check_together(name, operands)

        target = _target(name, kwargs.get("device"), operands)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != target.type:
            devices = f"a generator of {generator.device.type!r} on {target.type!r}"
            raise RefusedByGPU(f"{name}: {devices}: expected both on the same device type")
        if target.type == "cuda":
            on_cpu = {"device": CPU, "pin_memory": False}
            kwargs |= {option: on_cpu[option] for option in on_cpu if option in kwargs}
        result = func(*args, **kwargs)
        if name == "copy_" and kwargs.get("non_blocking", args[2:] == (True,)):
            _note_unfinished(result, operands[-1])
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


def _move(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``, in all its forms."""
    if "other" in kwargs:
        args = (kwargs.pop("other"), *args)
    if args and isinstance(args[0], torch.Tensor):
        args = (device_of(args[0]), args[0].dtype, *args[1:])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    source = device_of(tensor)
    target = source if device is None else _named(device)
    options = {"copy": copy or target != source}
    options["memory_format"] = memory_format or torch.preserve_format
    real = CPU if target.type == "cuda" else target
    result = torch.Tensor.to(tensor, real, dtype or tensor.dtype, **options)
    if result is not tensor:
        _place(result, target, [])
    if non_blocking:
        _note_unfinished(result, tensor)
    return result


def _note_unfinished(copy: torch.Tensor, source: torch.Tensor) -> None:
    if device_of(copy) == CPU and device_of(source).type == "cuda":
        _unfinished.add(_storage(copy))


def _finish_copies(*_: Any, **__: Any) -> None:
    _unfinished.clear()


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


# --- torch.cuda, autocast and nccl ----------------------------------------------------------------


class _Generator(torch._C.Generator):
    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, device="cpu")
        generator.place = _named(device)
        return generator

    device = property(lambda self: self.place)


class _Stream(contextlib.nullcontext):
    """A stream or an event: work is done when it is submitted, but a copy is finished only by a
    synchronization.
    """

    synchronize = _finish_copies
    record = wait = wait_event = wait_stream = is_capturing = lambda *_: None
    record_event = lambda *_: _Stream()
    elapsed_time = lambda *_: 1.0

    def __init__(self, *_, **__):
        super().__init__(self)

    def query(self):
        _finish_copies()
        return True


def _always(value: Any) -> Callable:
    return lambda *_, **__: value


_NO_CONTEXT = _always(contextlib.nullcontext())


def _cuda() -> dict[str, Any]:
    """What replaces the functions of torch.cuda and torch.accelerator; the others do nothing."""
    card = SimpleNamespace(name="Pretended GPU", major=9, minor=0, total_memory=80 * 2**30)
    rng_state = torch.zeros(16, dtype=torch.uint8)
    values = {
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": _current.count,
        "current_accelerator": torch.device("cuda"),
        "get_device_name": card.name,
        "get_device_capability": (card.major, card.minor),
        "get_device_properties": card,
        "mem_get_info": (card.total_memory, card.total_memory),
        "max_memory_allocated": 0,
        "get_rng_state": rng_state,
        "get_rng_state_all": [rng_state] * _current.count,
    }
    functions = {**vars(torch.cuda), **vars(torch.accelerator)}
    silent = [name for name, value in functions.items() if inspect.isfunction(value)]
    replaced = dict.fromkeys(silent, _always(False))
    replaced |= {name: _always(value) for name, value in values.items()}
    replaced |= dict.fromkeys(("stream", "device", "device_of", "_DeviceGuard"), _NO_CONTEXT)
    replaced |= dict.fromkeys(("Stream", "Event", "current_stream", "default_stream"), _Stream)
    replaced |= dict.fromkeys(("current_device", "current_device_index"), lambda: _current.index)
    replaced["set_device"] = lambda device: setattr(_current, "index", _named(device).index)
    replaced["synchronize"] = _finish_copies
    return replaced


def _autocast() -> dict[str, Any]:
    """CUDA's autocast is the CPU's, which computes; the CPU's belongs to a device nobody uses."""
    real = {"cuda": "cpu", "cpu": "xpu"}

    def renamed(name):
        function = getattr(torch, name)
        return lambda kind="cuda", *value: function(real[kind], *value)

    names = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype")
    return {name: renamed(name) for name in (*names, "set_autocast_dtype")}


def _nccl() -> dict[str, Any]:
    """Groups of nccl are groups of gloo that refuse tensors of the CPU."""
    state = SimpleNamespace(backend=None)
    real_init = c10d.init_process_group
    real_object_device = c10d._get_object_coll_device

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        state.backend = backend
        return real_init(backend and backend.replace("nccl", "gloo"), *args, **kwargs)

    def object_device(group=None):
        return f"cuda:{_current.index}" if state.backend == "nccl" else real_object_device(group)

    def guarded(name):
        collective = getattr(c10d, name)

        def call(*args, **kwargs):
            on_cpu = any(device_of(tensor) == CPU for tensor in _tensors((args, kwargs)))
            # Other groups may be of gloo.
            of_all = kwargs.get("group") in (None, dist.group.WORLD)
            if state.backend == "nccl" and of_all and on_cpu:
                raise RefusedByGPU(f"{name}: No backend type associated with device type cpu")
            return collective(*args, **kwargs)

        return call

    collectives = "all_reduce all_gather all_gather_into_tensor all_to_all all_to_all_single"
    collectives += " broadcast gather reduce reduce_scatter reduce_scatter_tensor scatter"
    replaced = {name: guarded(name) for name in collectives.split()}
    replaced["init_process_group"] = init_process_group
    replaced["_get_object_coll_device"] = object_device
    return replaced


def _changes() -> dict[Any, dict[str, Any]]:
    """Owner → attributes that are replaced."""
    run_thread = threading.Thread._bootstrap_inner
    run_backward = torch.autograd._engine_run_backward

    def run_followed(thread):
        with _Following():
            run_thread(thread)

    def run_backward_followed(*args, **kwargs):
        """Recomputed activations and hooks are followed too."""
        with _Following(in_backward=True):
            return run_backward(*args, **kwargs)

    def to_gpu(tensor, device=None, non_blocking=False, **kwargs):
        return tensor.to("cuda" if device is None else device, non_blocking=non_blocking, **kwargs)

    def index_of(tensor):
        return -1 if device_of(tensor).index is None else device_of(tensor).index

    cuda = _cuda()
    nccl = _nccl()
    return {
        torch.cuda: cuda,
        torch.accelerator: cuda,
        torch.cuda.amp.common: {"amp_definitely_not_available": _always(False)},
        torch: _autocast()
        | {
            "Generator": _Generator,
            "compile": lambda model=None, **_: model or (lambda model: model),
        },
        torch.nn.attention: {"sdpa_kernel": _NO_CONTEXT},
        torch.Tensor: {
            "cuda": to_gpu,
            "cpu": lambda tensor, **kwargs: tensor.to("cpu", **kwargs),
            "get_device": index_of,
            "record_stream": _always(None),
        },
        # The saved tensors of a forward pass were looked at where the mode is not active.
        torch.utils.checkpoint: {
            "_allowed_determinism_checks_to_fns": {"default": lambda x: (x.shape, x.dtype)}
        },
        torch.autograd: {"_engine_run_backward": run_backward_followed},
        threading.Thread: {"_bootstrap_inner": run_followed},
        c10d: nccl,
        dist: nccl,
    }


@contextlib.contextmanager
def pretended_gpu(count: int = 1) -> Iterator[None]:
    """Inside the block, the machine has ``count`` GPUs."""
    _current.count = count
    _current.index = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0
    with contextlib.ExitStack() as stack:
        for owner, attributes in _changes().items():
            for name in attributes.keys() & dir(owner):
                stack.enter_context(mock.patch.object(owner, name, attributes[name]))
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
