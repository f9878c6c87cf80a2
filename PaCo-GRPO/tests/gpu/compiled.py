"""Repeated blocks at full width through Inductor, Triton and ptxas, to binaries of several cards.

Nothing runs: the graphs are followed in shapes.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from fake_gpu import fake_gpu
from named import load
from real_step import few_blocks, sampled
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paco_grpo.estimate.generator import build_policy
from paco_grpo.policies.speed import compile_blocks

# Without a measurement of matrix products on the card.
ON_NO_CARD = {"shape_padding": False, "force_disable_caches": True, "compile_threads": 1}


def main(name: str, folder: str, capabilities: list[int]) -> dict[str, Any]:
    """Kernels of each class of blocks, with and without gradient, and the binaries of each card.

    ``name`` is a configuration, a capability 90 an H100's.
    """
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
    options = load(name)
    # The last block of Stable Diffusion 3.5 lacks layers.
    with few_blocks(options.pretrained.model, 2), fake_gpu(80) as gpu:
        policy = build_policy(options, gpu, "cuda:0")
        calls = first_calls(policy, options, 2)
    # Inductor asks Triton's driver for the card, which no driver of Triton's own finds here.
    target = {"get_current_target.return_value": GPUTarget("cuda", 90, 32)}
    triton.runtime.driver.set_active(mock.Mock(**target))
    sources: dict[str, str] = {}
    kernels: Counter[str] = Counter()

    def keep(self: AsyncCompile, kernel: str, source: str, device_str: str = "cuda") -> Any:
        sources.setdefault(source, kernel)

    def generate(graph: torch.fx.GraphModule, inputs: list, **how: Any) -> Callable:
        copied = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        compile_fx_inner(copied, inputs, **how)
        return make_boxed_func(graph.forward)

    with (
        gpu.mode,
        config.patch(ON_NO_CARD),
        mock.patch.object(AsyncCompile, "triton", keep),
        mock.patch("torch.Tensor.unflatten", unflatten),
        torch.autocast("cuda", torch.bfloat16),
    ):
        compile_blocks(policy, lambda graph, inputs: compile_fx(graph, inputs, generate))
        for block, args, kwargs in calls:
            before = len(sources)
            with torch.no_grad():
                block(*args, **kwargs)
            kernels[f"{type(block).__name__} sampling"] += len(sources) - before
            before = len(sources)
            args, kwargs = tree_map_only(torch.Tensor, as_leaf, (args, kwargs))
            sum(out.sum() for out in tree_leaves(block(*args, **kwargs))).backward()
            kernels[f"{type(block).__name__} training"] += len(sources) - before
    binaries = {capability: 0 for capability in capabilities}
    for source, kernel in sources.items():
        for capability in capabilities:
            binaries[capability] += bool(cubin(source, kernel, capability))
    return {"name": name, "kernels": kernels, "binaries": binaries}


def first_calls(policy: Any, options: Any, count: int) -> list[tuple[torch.nn.Module, tuple, dict]]:
    """The first block of each class that is compiled, and its first inputs in a rollout.

    ``count``: the batch.
    """
    transformer = policy.transformer
    calls: dict[str, Any] = {}

    def keep(block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        calls.setdefault(type(block).__name__, (block, args, kwargs))

    hooks = []
    for module in transformer.modules():
        if type(module).__name__ in transformer._repeated_blocks:
            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    sampled(policy, options, options.train.resolution, count)
    for hook in hooks:
        hook.remove()
    return list(calls.values())


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Needs a gradient, if it has the shape of tokens (B, N, C)."""
    is_tokens = tensor.is_floating_point() and tensor.ndim == 3
    return tensor.detach().requires_grad_(is_tokens)


def unflatten(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Dynamo does not follow PyTorch's own on fake tensors."""
    dim %= tensor.ndim
    return tensor.view(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def cubin(source: str, name: str, capability: int) -> bytes:
    """The binary of a kernel that Inductor wrote."""
    with mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"):
        kernel = getattr(PyCodeCache.load(source), name)
    choice = kernel.configs[0]
    meta = kernel._create_compile_meta(choice)
    written = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = kernel._create_compile_options(choice, meta)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(written, target=target, options=options).asm["cubin"]
