"""FSDP2 on fake ranks at full width: one rollout, loss and backward as rank 0."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_gpu import fake_gpu
from named import CONFIG
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paco_grpo import distributed
from paco_grpo.architectures import with_blocks
from paco_grpo.estimate.generator import build_policy, estimate, example, one_step
from paco_grpo.estimate.report import GIB
from paco_grpo.objectives import create_objective
from paco_grpo.options import read_options
from paco_grpo.sampling.denoise import Draws, Sampling, rollout


def main(name: str, ranks: int, blocks: int, *words: str) -> dict[str, Any]:
    """What rank 0 of ``ranks`` holds, 8 on a machine; ``words`` are options."""
    words = [*words, "--config.train.sharding=fsdp2", "--config.speed.compile=False"]
    options, _ = read_options(["--config", f"{CONFIG}/grpo.py:{name}", *words])
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    machine = mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    with machine, with_blocks(options.pretrained.model, blocks):
        estimated = estimate(options, name, ranks, 80 * GIB)
        with fake_gpu(80) as gpu:
            shown = shard_and_train(options, ranks, gpu)
    dist.destroy_process_group()
    adds = estimated.adds["train"]
    return shown | {"expected_gib": (adds["gradients"] + adds["activations"]) / GIB}


def reduce(tensor, reduction):
    """As accelerate's."""
    dist.all_reduce(tensor)
    return tensor


def shard_and_train(options, ranks, gpu):
    """What rank 0 holds and gets."""
    policy = build_policy(options, gpu, "cuda:0")
    transformer = policy.transformer
    parameters = dict(transformer.named_parameters())
    elements = sum(p.numel() for name, p in parameters.items() if "lora_" not in name)
    device = torch.device("cuda:0")
    accelerator = SimpleNamespace(device=device, num_processes=ranks, reduce=reduce)
    # A fake collective operation returns nothing of the others.
    with mock.patch.object(distributed, "gather_object", lambda values: values * ranks):
        strategy = distributed.FSDP2(accelerator)
        strategy.place(policy)
    parameters = dict(transformer.named_parameters())
    base = [p for name, p in parameters.items() if "lora_" not in name]
    adapter = [p for name, p in parameters.items() if "lora_" in name]
    side = options.train.resolution
    text = policy.encode([example(policy, options, side)]).select([0])
    noise = {"noise_steps": (0,), "noise_level": options.sample.noise_level}
    sampled = rollout(policy, text, Draws([0], [0], side, side), Sampling(num_steps=2, **noise))
    objective = create_objective(options.train)
    step = one_step(sampled, objective, 1)
    live = gpu.live
    gpu.peak = live
    objective.loss(step, policy).loss.sum().backward()
    train_peak = gpu.peak
    trained = [p for p in parameters.values() if p.requires_grad]
    num_gradients = sum(p.grad is not None for p in trained)
    strategy.finish_gradients(trained, 1.0)
    local = [p.to_local() for p in base if isinstance(p, DTensor)]
    return {
        "base": elements,
        "base_here": sum(p.numel() for p in local),
        "base_sharded": all(isinstance(p, DTensor) for p in base),
        "base_kinds": sorted({f"{p.dtype} {p.device}" for p in local}),
        "adapter_whole": not any(isinstance(p, DTensor) for p in adapter),
        "adapter_kinds": sorted({f"{p.dtype} {p.device}" for p in adapter}),
        "trained": len(trained),
        "gradients": num_gradients,
        "mesh": list(base[0].device_mesh.shape),
        "train_gib": (train_peak - live) / GIB,
    }
