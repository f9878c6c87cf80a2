"""Bytes that a compiled block reads and writes in sampling, when each layer casts its tokens for
itself, and when they are cast once, as in every run (``share_casts`` in policies/speed.py).

    python benchmarks/block_bytes.py                      # every model family, for half an hour
    python benchmarks/block_bytes.py t2is klein_editing   # these configurations

A row is the first block of a kind. It counts the kernels that an H100 launches for it: all of them
without compilation, and the Triton kernels that Inductor writes, with the sum of their bytes
(``kernel_num_gb``). Matrix products and attention move the same bytes in both cases and are left
out. The H100 is simulated (tests/gpu), which takes a C compiler (cc), and nothing is computed.
"""

import argparse
import copy
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests")]

import torch
import triton
from compiled import ON_NO_CARD, first_calls, unflatten
from fake_gpu import fake_gpu, library
from named import load
from real_step import few_blocks
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from typing_extensions import override

from paco_grpo.estimate.generator import build_policy
from paco_grpo.policies import adapters
from paco_grpo.policies.speed import compile_blocks

# Of every class of transformers and size of blocks; editing adds the tokens of a reference image.
FAMILIES = (
    "t2is",
    "kontext_editing",
    "flux2_t2is",
    "klein_t2is",
    "krea_t2is",
    "longcat_t2is",
    "longcat_editing",
    "t2is_qwen",
    "qwen_editing",
    "qwen_editing_2511",
    "qwen21_t2is",
    "sd3_t2is",
    "z_image_t2is",
)
NOT_KERNELS = ("aten::empty.memory_format", "aten::empty_like", "aten::_unsafe_view")
HEAD = f"{'configuration':<18} {'block':<34} {'eager kernels':<14} {'Triton kernels':<14} GB"


class Kernels(TorchDispatchMode):
    """Counts operators that compute something: neither views nor empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = [result.alias_info for result in func._schema.returns]
        is_view = all(alias is not None and not alias.is_write for alias in results)
        if func.namespace == "aten" and not is_view and func.name() not in NOT_KERNELS:
            self.count += 1
        return func(*args, **(kwargs or {}))


def kernels_of(name: str, batch: int, shared: bool) -> dict[str, tuple[int, int, float]]:
    """By kind of block: eager kernels, Triton kernels and the GB of these.

    Args:
        name: A configuration of config/grpo.py, of which two blocks of each kind are built.
        batch: Images of a forward.
        shared: Whether layers share the casts of their tokens.
    """
    options = load(name)
    share_casts = adapters.share_casts if shared else lambda transformer: None
    eager = {}
    counts = {}
    with (
        few_blocks(options.pretrained.model, 2),
        fake_gpu(80) as gpu,
        mock.patch.object(adapters, "share_casts", share_casts),
    ):
        policy = build_policy(options, gpu, "cuda:0")
        calls = first_calls(policy, options, batch)
        for block, args, kwargs in calls:
            with torch.no_grad(), policy.autocast(), Kernels() as kernels:
                block(*args, **kwargs)
            eager[type(block).__name__] = kernels.count
    programs: list[str] = []  # that Inductor writes for a block
    with (
        gpu.mode,
        torch.no_grad(),
        torch.autocast("cuda", torch.bfloat16),
        config.patch(ON_NO_CARD | {"profile_bandwidth": True}),
        mock.patch.object(AsyncCompile, "triton", lambda *args, **kwargs: None),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(programs.append)),
        mock.patch("torch.Tensor.unflatten", unflatten),
    ):
        compile_blocks(policy, lambda graph, inputs: compile_fx(graph, inputs, write_program))
        if not shared:
            config.post_grad_custom_pre_pass = None
        for block, args, kwargs in calls:
            programs.clear()
            block(*args, **kwargs)
            kind = type(block).__name__
            counts[kind] = (eager[kind], *triton_kernels("\n".join(programs)))
    return counts


def write_program(graph: torch.fx.GraphModule, inputs: list, **how: Any) -> Callable:
    """Inductor's program for ``graph`` is written, but the graph itself is followed in shapes."""
    copied = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
    compile_fx_inner(copied, inputs, **how)
    return make_boxed_func(graph.forward)


def triton_kernels(program: str) -> tuple[int, float]:
    """How many Triton kernels a program of Inductor launches, and how many GB these move."""
    gigabytes = {}
    for definition in program.split(" = async_compile.triton(")[1:]:
        name = definition.split("'")[1]
        gigabytes[name] = float(re.search(r"'kernel_num_gb': ([\d.e-]+)", definition)[1])
    launches = Counter(re.findall(r"^ +(triton_\w+)\.run\(", program, flags=re.MULTILINE))
    return launches.total(), sum(gigabytes[name] * launches[name] for name in launches)


def find_a_simulated_gpu() -> None:
    """Start this program again, where PyTorch finds the H100 of tests/gpu."""
    folder = Path(tempfile.mkdtemp())
    environment = os.environ | {"LD_PRELOAD": str(library(folder)), "FAKE_CUDA_CAPABILITY": "90"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("configurations", nargs="*", default=FAMILIES, help="of config/grpo.py")
    parser.add_argument("--batch", type=int, default=6, help="images of a forward (6)")
    arguments = parser.parse_args(words)
    if "FAKE_CUDA_CAPABILITY" not in os.environ:
        find_a_simulated_gpu()
    # Inductor asks Triton's driver for the card.
    target = {"get_current_target.return_value": GPUTarget("cuda", 90, 32)}
    triton.runtime.driver.set_active(mock.Mock(**target))
    print(HEAD)
    for name in arguments.configurations:
        separate = kernels_of(name, arguments.batch, shared=False)
        shared = kernels_of(name, arguments.batch, shared=True)
        for kind in separate:
            eager, kernels, gigabytes = separate[kind]
            shared_eager, shared_kernels, shared_gigabytes = shared[kind]
            eager_change = f"{eager} -> {shared_eager}"
            kernel_change = f"{kernels} -> {shared_kernels}"
            row = f"{name:<18} {kind:<34} {eager_change:<14} {kernel_change:<14} "
            print(f"{row}{gigabytes:.2f} -> {shared_gigabytes:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
