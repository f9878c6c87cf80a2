"""A GPU of shapes: PyTorch's own CUDA dispatch, autocast, backward, fused AdamW and FSDP2 without a
GPU.

``run`` starts a process whose PyTorch finds the devices of fake_cuda.c. Inside ``fake_gpu``,
tensors on them have a shape, a data type and a device, and no values, except for the integers by
which models decide what they compute.

    python fake_gpu.py '["MODULE", ARGUMENT, …]' …     # a line of JSON for each
"""

import importlib
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from paco_grpo.estimate.fake_device import FakeDevice, aten, numpy_of, tensors_of
from paco_grpo.estimate.generator import RESERVE

HERE = Path(__file__).resolve().parent
GRPO = HERE.parents[1]
REWARD = GRPO.parent / "PaCo-Reward"
PYTHONPATH = [HERE, HERE.parent, GRPO, GRPO / "benchmarks", REWARD / "judge"]
PYTHONPATH.append(REWARD / "LLaMA-Factory" / "src")
GIB = 2**30
ON_GPU = "torch.float32 cuda:0"


def run(folder: Path, *calls: list[Any], capability: int = 90) -> list[dict[str, Any]]:
    """What ``main`` of modules beside this one returns on fake GPUs, called one after the other.

    A call is the module's name and the arguments. ``capability``: 90 is an H100's. Skips where
    PyTorch or cc cannot.
    """
    environment = os.environ | {"LD_PRELOAD": str(library(folder)), "OMP_NUM_THREADS": "1"}
    environment["FAKE_CUDA_CAPABILITY"] = str(capability)
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, PYTHONPATH)), "HF_HUB_OFFLINE": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)
    command = [sys.executable, __file__, *map(json.dumps, calls)]
    options = {"cwd": GRPO, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=580, check=False, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def library(folder: Path) -> Path:
    """fake_cuda.c, compiled into ``folder``."""
    if torch.version.cuda is None:
        pytest.skip("this PyTorch is built for the CPU (PACO_TORCH_BACKEND=default bash setup.sh)")
    packages = Path(torch.__file__).parents[1]
    headers = [packages / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}" / "include"]
    headers.append(packages / "triton" / "backends" / "nvidia" / "include")
    built = folder / "fake_cuda.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(built)]
    command += [f"-I{header}" for header in headers]
    try:
        subprocess.run([*command, str(HERE / "fake_cuda.c")], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler (cc)")
    return built


def kind(tensor: torch.Tensor | None) -> str:
    """Data type and device."""
    return "missing" if tensor is None else f"{tensor.dtype} {tensor.device}"


class FakeGPU(FakeDevice):
    """Counts the bytes of fake tensors on CUDA; operations that create tensors there make them."""

    kind = "cuda"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors = tensors_of(args, kwargs)
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        _check(func, tensors, args, kwargs)
        if not fakes and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        values = _values(func, tensors, args, kwargs)
        if isinstance(values, (int, float)):  # a bool, too
            return values
        if func is aten.index.Tensor:
            args = args[0], [index if _known(index) is None else _known(index) for index in args[1]]
        if values is not None and torch.Tag.dynamic_output_shape in func.tags:
            device = fakes[0].fake_device
            out = tree_map_only(torch.Tensor, lambda value: self._empty(value, device), values)
        else:
            out = self.compute_shapes(func, args, kwargs)
        if values is not None:
            for tensor, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
                if isinstance(tensor, FakeTensor):  # else the handle of a collective operation
                    tensor.known = value
        return out

    def _empty(self, like: torch.Tensor, device: torch.device) -> FakeTensor:
        with self.mode:
            empty = torch.empty(like.shape, dtype=like.dtype, device=device)
        self._count(empty)
        return empty


def _check(func: Any, tensors: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
    """What a GPU refuses, or gets wrong, and shapes do not show."""
    if func.namespace == "c10d" and any(tensor.device.type == "cpu" for tensor in tensors):
        raise RuntimeError(f"{func}: NCCL takes no tensor of the CPU")
    operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
    device = operands[0].device if operands else torch.device("cpu")
    device = torch.device(kwargs.get("device") or device)
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != device.type:
        raise RuntimeError(f"{func}: a generator of {generator.device} on {device}")
    is_copy = func in (aten._to_copy.default, aten.copy_.default)
    is_unfinished = kwargs.get("non_blocking") or (is_copy and args[-1] is True)
    if is_copy and is_unfinished and device.type == "cpu" and operands[-1].device.type == "cuda":
        raise RuntimeError(f"{func}: a copy to the CPU that is read before it is finished")


# Creates integers, by which models decide what they compute.
_KNOWN_FROM_THE_START = (aten.arange, aten.ones, aten.zeros, aten.scalar_tensor)


def _known(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "known", None)
    return None if tensor is None or tensor.is_floating_point() else tensor


def _values(func: Any, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The result of ``func`` if it follows from known numbers, else None."""
    known = {id(tensor): _known(tensor) for tensor in tensors}
    if any(value is None for value in known.values()):
        if func._schema.is_mutable and tensors:
            tensors[0].known = None
        return None
    if not tensors and func._overloadpacket not in _KNOWN_FROM_THE_START:
        return None
    kwargs = {name: kwargs[name] for name in kwargs if name not in ("device", "pin_memory")}
    with unset_fake_temporarily():
        args, kwargs = tree_map_only(torch.Tensor, lambda t: known[id(t)], (args, kwargs))
        return func(*args, **kwargs)


def _resize(gpu: FakeGPU, storage: torch.UntypedStorage, num_bytes: int) -> None:
    """As FSDP2 frees and allocates the weights of a block."""
    torch.UntypedStorage.__base__.resize_(storage, num_bytes)
    if storage in gpu.sizes:
        gpu.resize(gpu.sizes[storage], num_bytes)


def _numpy_of_cpu(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu":
        raise TypeError(f"numpy() of a tensor on {tensor.device}")
    return numpy_of(tensor)


_tensor = torch.tensor


def _tensor_of(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor``, which reads the memory of tensors in a list."""
    if isinstance(data, list):
        data = [x.item() if isinstance(x, torch.Tensor) else x for x in data]
    return _tensor(data, *args, **kwargs)


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    torch.Tensor.data.__set__(tensor, value)
    tensor.fake_device = value.fake_device


@contextmanager
def fake_gpu(memory_gb: float) -> Iterator[FakeGPU]:
    """A GPU with so much memory, in GiB, of which CUDA itself takes ``RESERVE``."""
    gpu = FakeGPU()
    total = int(memory_gb * 2**30)
    patches = {
        "torch.cuda.mem_get_info": lambda *_: (total - RESERVE - gpu.live, total),
        "torch.tensor": _tensor_of,
        "torch.Tensor.numpy": _numpy_of_cpu,
        "torch.Tensor.pin_memory": lambda tensor, *_: tensor,
        "torch.UntypedStorage.resize_": lambda storage, size: _resize(gpu, storage, size),
        "torch.utils.swap_tensors": _set_data,  # it refuses tensors that have a weak reference
    }
    with ExitStack() as stack:
        for target, replacement in patches.items():
            stack.enter_context(mock.patch(target, replacement))
        data = property(torch.Tensor.data.__get__, _set_data)
        stack.enter_context(mock.patch.object(FakeTensor, "data", data, create=True))
        stack.enter_context(gpu)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") is a copy
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        yield gpu


def main() -> int:
    """A line for each call; returns the exit status."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        for text in sys.argv[1:]:
            module, *arguments = json.loads(text)
            print(json.dumps(importlib.import_module(module).main(*arguments)), flush=True)
    except BaseException:  # noqa: BLE001 - shown, and told by the status
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # autograd's threads abort at a normal exit without a driver
