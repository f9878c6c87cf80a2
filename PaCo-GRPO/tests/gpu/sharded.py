"""FSDP2 on fake ranks at full width: one rollout, loss and backward as rank 0."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_gpu import GIB, ON_GPU, FakeGPU, fake_gpu, kind
from named import CONFIG
from real_step import few_blocks, sampled
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paco_grpo import distributed
from paco_grpo.estimate.generator import build_policy, estimate, one_step
from paco_grpo.objectives import create_objective
from paco_grpo.options import RunOptions, read_options

BF16 = "torch.bfloat16 cuda:0"


def main(name: str, ranks: int, blocks: int | None, *words: str) -> dict[str, Any]:
    """GiB that training adds on rank 0 of ``ranks``, 8 on a machine; ``words`` are options.

    Raises:
        AssertionError: Something is not sharded, or has no gradient.
    """
    words = [*words, "--config.train.sharding=fsdp2", "--config.speed.compile=False"]
    options, _ = read_options(["--config", f"{CONFIG}/grpo.py:{name}", *words])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    machine = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    with machine, few_blocks(options.pretrained.model, blocks):
        adds = estimate(options, name, ranks, 80 * GIB).adds["train"]
        with fake_gpu(80) as gpu:
            train_gib = shard_and_train(options, ranks, gpu)
    dist.destroy_process_group()
    expected = (adds["gradients"] + adds["activations"]) / GIB
    return {"name": name, "ranks": ranks, "train_gib": train_gib, "expected_gib": expected}


def reduce(tensor, reduction="sum"):
    """As accelerate's."""
    dist.all_reduce(tensor)
    return tensor


def shard_and_train(options: RunOptions, ranks: int, gpu: FakeGPU) -> float:
    """GiB that the gradients, and a loss and its backward, add."""
    policy = build_policy(options, gpu, "cuda:0")
    base, _ = divided(policy)
    elements = sum(parameter.numel() for parameter in base)
    device = torch.device("cuda:0")
    accelerator = SimpleNamespace(device=device, num_processes=ranks, reduce=reduce, gather=reduce)
    # A fake collective operation returns nothing of the others.
    with mock.patch.object(distributed, "gather_object", lambda values: values * ranks):
        strategy = distributed.FSDP2(accelerator)
        strategy.place(policy)
    base, adapter = divided(policy)
    assert all(isinstance(parameter, DTensor) for parameter in base)
    assert base[0].device_mesh.shape == ((8,) if ranks == 8 else (ranks // 8, 8))
    local = [parameter.to_local() for parameter in base]
    assert {kind(tensor) for tensor in local} == {BF16 if options.use_lora else ON_GPU}
    share = 8 * sum(tensor.numel() for tensor in local) / elements
    assert 0.99 < share < 1.01, share
    assert not any(isinstance(parameter, DTensor) for parameter in adapter)
    assert {kind(parameter) for parameter in adapter} <= {ON_GPU}
    side = options.train.resolution
    noise = {"noise_steps": (0,), "noise_level": options.sample.noise_level}
    images = sampled(policy, options, side, 1, **noise)
    objective = create_objective(options)
    step = one_step(images, 0, 1)
    live = gpu.live
    for _ in range(2):  # the second backward adds to the gradients of the first
        gpu.peak = gpu.live
        objective.loss(step, policy).loss.sum().backward()
    peak = gpu.peak
    trained = adapter if options.use_lora else base
    assert all(parameter.grad is not None for parameter in trained)
    strategy.finish_gradients(trained, 1.0)
    assert list(strategy.synced_batches([0], None)) == [(0, False)]
    return (peak - live) / GIB


def divided(policy: Any) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Parameters of the base, and of the adapter."""
    base = []
    adapter = []
    for name, parameter in policy.transformer.named_parameters():
        part = adapter if "lora_" in name else base
        part.append(parameter)
    return base, adapter
