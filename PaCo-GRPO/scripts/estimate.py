"""Does a configuration fit on a GPU, what fills the memory, and roughly how long is an epoch? No weights, no GPU, a minute.

    python scripts/estimate.py --config config/grpo.py:t2is --gpu "H100 80GB" --processes 8
    python scripts/estimate.py --config config/grpo.py:t2is_24gb --memory_gb 24 --config.train.batch_size=2
    python scripts/estimate.py --config config/grpo.py:t2is --gpus 8      # how many of the 8 should serve the judge?
    python scripts/estimate.py --judge --processes 2                      # judge training (another: --judge YAML)

The policy encodes, samples, decodes and computes its loss at the model's real shapes on a fake CUDA device. Tensors on
two devices, wrong shapes and data types are errors here as on a GPU. The backward pass runs on a fake CPU. The seconds
assume that every GPU reaches EFFICIENCY of its stated peak. Not estimated: speed.compile, DeepSpeed, and training
of a judge's vision tower.

Exit status: 0 = fits; 1 = does not fit, or the code failed; 2 = a wrong option.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import pkgutil
import statistics
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries read it

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from paco_grpo.architectures import judge_of, pipeline_of
from paco_grpo.data.prompts import DataError, load_prompts
from paco_grpo.objectives import Objective, Step, get_objective
from paco_grpo.objectives.dgpo import Dgpo
from paco_grpo.options import ConfigError, RunOptions, read_options
from paco_grpo.policies import POLICIES, Policy, PolicyLoadError
from paco_grpo.policies.lora import START, add_lora, add_snapshot, lora_parameters
from paco_grpo.sampling.denoise import Sampling, rollout
from paco_grpo.training.plan import Plan, make_plan
from paco_grpo.types import Item
from paco_judge.grid import split_prompt

aten = torch.ops.aten
GIB = 2**30
RESERVE = 1.5 * GIB  # CUDA context and libraries, workspaces of cuBLAS and cuDNN, fragmentation
EFFICIENCY = 0.35  # assumed share of a GPU's stated bfloat16 peak
# Usable GiB of the smallest card sold as such (ECC on), and stated dense bfloat16 TFLOP a second.
GPUS = {
    "B200 180GB": (178.0, 2250), "H200 141GB": (139.8, 989), "H100 80GB": (79.2, 989), "H800 80GB": (79.2, 989),
    "A100 80GB": (79.2, 312), "L40S 48GB": (44.4, 362), "A6000 48GB": (47.4, 155), "A100 40GB": (39.4, 312),
    "RTX 5090 32GB": (31.3, 210), "RTX 4090 24GB": (23.5, 165), "RTX 3090 24GB": (23.5, 71),
}  # fmt: skip
# Parameters of rewards that load a model on the device of the process.
_VIT_H = ("OpenCLIP ViT-H-14", 986_109_441)
REWARD_PARAMETERS = {
    "subfig_clipT": _VIT_H, "subfig_clipI": _VIT_H, "pickscore": ("PickScore", _VIT_H[1]),
    "clipscore": ("CLIP ViT-L/14", 427_616_513),
}  # fmt: skip
# Tokens of a pair's prompt; parameters of Qwen2.5-VL-7B.
JUDGE_TOKENS, JUDGE_PARAMETERS = 300, 8.3e9
TEXT_TOKENS, ANSWER_TOKENS = 150, 100  # of a pair in judge training, besides its two images
ROOT = Path(__file__).resolve().parents[2]
PUBLISHED_JUDGE = ROOT / "PaCo-Reward" / "config" / "paco_reward_lora.yaml"
PROMPT = (
    "A 2x2 grid of images that show one fox in four seasons, watercolor on rough paper, soft morning light. "
    * 4
)


_FLOPS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[aten._scaled_dot_product_flash_attention_backward],
}  # fmt: skip


class FakeDevice(TorchDispatchMode):
    """Operations on fake tensors, and those that create tensors on CUDA, compute shapes alone; all others run for real."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind  # of the device whose tensors are counted
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = self.peak = 0  # bytes of the fake tensors that exist, and their maximum
        self.flops = 0  # of matrix products, convolutions and attention
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
            with unset_fake_temporarily():
                return (
                    known.item()
                    if known is not None
                    else 1e-6
                    if args[0].is_floating_point()
                    else 1
                )
        values = _values(func, tensors, args, kwargs)
        to_cpu = func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if to_cpu and fake and fake[0].fake_device.type == "cuda":  # what comes back is real
            with unset_fake_temporarily():
                zeros = torch.zeros(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype))
                return zeros if values is None else values
        if (
            func is aten.index.Tensor
        ):  # a mask whose values are known selects a known number of rows
            args = args[0], [rows for index in args[1] for rows in _rows(index)]
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        with self.mode:
            if values is not None and torch.Tag.dynamic_output_shape in func.tags:
                where = fake[0].fake_device
                out = tree_map_only(
                    torch.Tensor,
                    lambda t: torch.empty(t.shape, dtype=t.dtype, device=where),
                    values,
                )
            else:
                out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=out)
        made = [t for t in tree_leaves(out) if isinstance(t, FakeTensor)]
        for tensor in made:
            storage = tensor.untyped_storage()
            if tensor.fake_device.type == self.kind and storage not in self.seen:
                size = -(-storage.nbytes() // 512) * 512  # CUDA's allocator rounds up
                self.seen.add(storage)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, size)
        if values is not None:
            for tensor, value in zip(made, tree_leaves(values), strict=True):
                tensor.known = value
        return out

    def _faked(self, tensor: torch.Tensor) -> FakeTensor:
        with unset_fake_temporarily():
            return (
                tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor.detach())
            )

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
    """The result of ``func`` if it follows from known integers: sizes of pictures and masks decide what a model computes."""
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
    """``scaled_dot_product_attention`` as CUDA computes it: autocast, one data type, a fused kernel."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(low) if t.is_floating_point() else t for t in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"query, key and value must have one dtype, not {query.dtype}, {key.dtype}, {value.dtype}"
        )
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
    make = torch.tensor

    def of_numbers(
        data: Any, **kwargs: Any
    ) -> torch.Tensor:  # a list of CUDA tensors would look for the driver
        numbers = (
            [x.item() if isinstance(x, torch.Tensor) else x for x in data]
            if isinstance(data, list)
            else data
        )
        return make(numbers, **kwargs)

    patches = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: (
            False
        ),  # autocast would switch itself off
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
_FLOAT32 = (
    *(
        f"torch.nn.functional.{name}"
        for name in ("layer_norm", "rms_norm", "group_norm", "softmax")
    ),
    *(
        f"torch.{place}{name}"
        for place in ("", "Tensor.")
        for name in ("pow", "rsqrt", "softmax", "sum")
    ),
)


def _in_float32(function: Callable) -> Callable:
    def compute(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tree_map_only(
                torch.Tensor, lambda t: t.float() if t.dtype == torch.bfloat16 else t, args
            )
        return function(*args, **kwargs)

    return compute


@contextlib.contextmanager
def fake_cpu(device: FakeDevice) -> Iterator[None]:
    """Inside the block, operations on fake tensors of the CPU compute nothing; PyTorch's own autograd works with them."""
    with contextlib.ExitStack() as stack:
        for target in _FLOAT32:
            stack.enter_context(mock.patch(target, _in_float32(pkgutil.resolve_name(target))))
        stack.enter_context(device)
        yield


def place(module: nn.Module, device: FakeDevice, on: str) -> None:
    """Replace the tensors on ``meta`` by fake ones, uncounted: parameters and buffers on ``on``; outside ``device``'s block."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for tensors, where in ((part._parameters, on), (part._buffers, on), (vars(part), "cpu")):
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    if id(tensor) not in made:
                        with device.mode:
                            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
                        device.seen.add(new.untyped_storage())
                        parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = (
                            nn.Parameter(new, tensor.requires_grad) if parameter else new
                        )
                    tensors[name] = made[id(tensor)]


class Work(NamedTuple):
    """One kind of work of a GPU."""

    name: str
    pieces: float  # per epoch, evaluation or 10,000 pairs
    flops: float  # of a piece


@dataclass
class Estimate:
    """What one GPU does and holds."""

    title: str
    work: dict[str, list[Work]]  # by what it is for: "an epoch"
    resident: dict[str, int]  # bytes that stay on the device, by part
    adds: dict[str, dict[str, int]]  # bytes that a phase adds at its peak, by part
    plan: Plan | None = None  # of an epoch


def build_policy(options: RunOptions, device: FakeDevice, on: str) -> Policy:
    """The policy with its adapters, and with fake weights on the device ``on``."""
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    pipeline = pipeline_of(options.pretrained.model, dtype)
    kind = pkgutil.resolve_name(POLICIES[type(pipeline).__name__])
    more = {"image_positions": options.pretrained.image_positions} if kind.text_sees_image else {}
    policy = kind(
        pipeline, dtype=dtype, device="meta", max_sequence_length=options.max_sequence_length or 512,
        guidance_scale=options.sample.guidance_scale, negative_prompt=options.sample.negative_prompt, **more,
    )  # fmt: skip
    train = options.train
    with torch.device("meta"):
        if options.use_lora:
            add_lora(policy, train.lora_rank, train.lora_alpha, train.lora_targets)
        else:
            policy.transformer.float().requires_grad_(True)
        objective = get_objective(train.loss_type)(train)
        snapshots = [snapshot.name for snapshot in objective.snapshots]
        for snapshot in [START] * (train.reference == "start") + snapshots:
            add_snapshot(policy, snapshot)
    if options.enable_gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    for module in (policy.transformer, policy.pipeline.vae, *policy.text_encoders()):
        place(module, device, on)
    policy.device = torch.device(on)
    return policy


class Measured(NamedTuple):
    """What a piece of work returns and costs."""

    result: Any
    flops: int
    peak: int  # bytes above what existed before


def measured(device: FakeDevice, function: Callable[[], Any]) -> Measured:
    before, flops = device.live, device.flops
    device.peak = before
    result = function()
    return Measured(result, device.flops - flops, device.peak - before)


def estimate(options: RunOptions, name: str, processes: int = 1) -> Estimate:
    """Run every kind of work once on fake tensors, and scale it to an epoch."""
    sample, train, test = options.sample, options.train, options.test
    objective = get_objective(train.loss_type)(train)
    plan = make_plan(options, processes, objective.gradient_steps)
    device = FakeDevice("cuda")
    policy = build_policy(options, device, "cuda:0")
    batch = plan.sample_batch_size
    edits = policy.needs_image or (
        policy.edits_images and options.prompt_fn in ("geneval_image", "arrow_editing")
    )
    noisy = bool(sample.noise_steps and sample.noise_level)
    one_step = dataclasses.replace(train, timesteps=(0,), num_sigmas=None)
    objective_of_one_step = get_objective(train.loss_type)(one_step)

    def sampled(side: int, count: int, **more: Any) -> list[Measured]:
        """Encoding of a text, two steps for ``count`` images, their decoding."""
        item = Item(0, PROMPT, side, side, image=Image.new("RGB", (side, side)) if edits else None)
        encode = measured(device, lambda: policy.encode([item]))
        text, ids, how = encode.result, [0] * count, Sampling(num_steps=2, **more)
        denoise = measured(
            device, lambda: rollout(policy, text.select(ids), ids, range(count), side, side, how)
        )
        return [
            encode,
            denoise,
            measured(device, lambda: policy.decode(denoise.result.clean_latents, side, side)),
        ]

    with fake_cuda(device):
        noise = {
            "noise_steps": (0,) if noisy else (),
            "noise_level": sample.noise_level,
            "cps": sample.cps,
        }
        encode, denoise, decode = sampled(train.resolution, batch, **noise)
        images = denoise.result
        trained = images.select([0] * min(train.batch_size, plan.samples_per_process))
        objective_of_one_step.loss(_step(trained, objective_of_one_step), policy)
        _, show, decode_test = sampled(test.resolution, test.batch_size)
    device = FakeDevice("cpu")
    policy = build_policy(options, device, "cpu")
    with device.mode:
        on_cpu = _map(
            lambda t: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, FakeTensor) else t,
            trained,
        )
    step = _step(on_cpu, objective_of_one_step)
    with fake_cpu(device):
        _add_gradients(policy.transformer)
        first = measured(
            device,
            lambda: (
                objective_of_one_step.error_change(step, policy)
                if isinstance(objective_of_one_step, Dgpo)
                else None
            ),
        )
        update = measured(
            device, lambda: objective_of_one_step.loss(step, policy).loss.sum().backward()
        )

    # from these pieces to an epoch
    noise_steps = (sample.num_noise_steps or len(sample.noise_steps)) if noisy else 0
    before = min(sample.noise_steps) if noisy else sample.num_steps
    tail = sample.num_steps - 1 - max(sample.noise_steps) if noisy else 0
    forwards = sample.num_steps - tail + min(tail, sample.tail_steps or tail)
    if sample.same_latent:
        forwards -= before * (
            1 - 1 / min(batch, sample.num_images_per_prompt // sample.latents_per_prompt)
        )
    schedule = dataclasses.replace(
        images, sigmas=range(sample.num_steps + 1),
        noise_steps=[dataclasses.replace(images.noise_steps[0], index=i) for i in sample.noise_steps[:noise_steps]],
    )  # fmt: skip
    steps = len(objective.steps(schedule, np.random.default_rng(0))) * train.num_inner_epochs
    work = [
        Work("encode", min(plan.prompts, plan.samples_per_process), encode.flops),
        Work("denoise", plan.rollout_batches * forwards, denoise.flops / 2),
        Work("decode", plan.rollout_batches, decode.flops),
        Work(
            "train",
            -(-plan.samples_per_process // train.batch_size) * steps,
            first.flops + update.flops,
        ),
    ]
    if options.health.probe_images and options.use_lora:
        work.append(Work("probe", options.health.probe_images, denoise.flops / 2 / batch))
    test_images = test.num_images or test.batch_size  # where the prompt set is not here
    with contextlib.suppress(DataError):
        test_images = test.num_images or len(
            load_prompts(options.dataset, "test", options.prompt_fn)
        )
    batches = math.ceil(test_images / (processes * test.batch_size))
    evaluation = [
        Work("evaluate", batches * test.num_steps, show.flops / 2), Work("decode", batches, decode_test.flops)
    ]  # fmt: skip
    # memory
    blocks = [part for part in policy.transformer.children() if isinstance(part, nn.ModuleList)]
    saved, layer = _quantized(blocks, 4 if options.pretrained.quantize else None)
    resident, offloaded, gradients = _weights(policy, options, processes, saved)
    resident |= reward_bytes(options)
    kept = _bytes(images) - _bytes(images.conditioning)
    recorded = sum(_bytes(step) for step in images.noise_steps)
    per_image = (kept + (noise_steps - 1) * recorded) // batch  # nothing is recorded without noise
    records = per_image * plan.samples_per_process + _bytes(encode.result) * min(
        plan.prompts, plan.samples_per_process
    )
    vae = offloaded.get("VAE", 0)
    moved = sum(size for part, size in offloaded.items() if part != "VAE" or edits)
    adds = {
        "encode": {"weights": moved, "activations": encode.peak},
        "sample": {
            "records": records,
            "denoising": denoise.peak + layer,
            "decoding meanwhile": decode.peak + vae,
        },
        "train": {
            "records": records,
            "gradients": gradients,
            "activations": max(update.peak, first.peak) + layer,
        },
        "update": {
            "records": records,
            "gradients": gradients,
            "gradients in one message": gradients * (processes > 1),
        },
        "evaluate": {"denoising": show.peak + layer},
        "show": {"decoding": decode_test.peak + vae},
    }
    title = (
        f"{name} on {processes} GPU(s): {plan.samples} images an epoch ({plan.prompts} prompts x {plan.images_per_prompt}), "
        f"sampled {batch} and trained {train.batch_size} at a time; {test_images} in an evaluation"
    )
    return Estimate(title, {"an epoch": work, "an evaluation": evaluation}, resident, adds, plan)


def _step(sampled: Any, objective: Objective) -> Step:
    (index,) = objective.steps(sampled, np.random.default_rng(0))
    ones = torch.ones(len(sampled), device=sampled.clean_latents.device)
    return Step(sampled, index, ones, group_weights=ones)


def _add_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def _map(function: Callable, value: Any) -> Any:
    """``value``, a batch or a part of one, with ``function`` of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list):
        return [_map(function, part) for part in value]
    if dataclasses.is_dataclass(value):
        parts = {f.name: _map(function, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _bytes(value: Any) -> int:
    """Bytes of the tensors in a module, a list or a batch."""
    sizes: list[int] = []
    parts = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value
    _map(lambda tensor: sizes.append(tensor.nbytes) or tensor, parts)
    return sum(sizes)


def _quantized(parts: Iterable[nn.Module], bits: int | None) -> tuple[int, int]:
    """Bytes that bitsandbytes saves in the linear layers of ``parts``, and bytes of the largest of them, decoded."""
    named = [module for part in parts for module in part.named_modules() if bits]
    linear = [(name, module.weight) for name, module in named if isinstance(module, nn.Linear)]
    layers = [weight for name, weight in linear if "lora_" not in name and "lm_head" not in name]
    stored = (
        1 if bits == 8 else 1 / 2 + 1 / 64 + 1 / 4096
    )  # nf4: 8 bits for 64 weights, a float32 for 256 of these
    saved = sum(int(weight.nbytes - weight.numel() * stored) for weight in layers)
    return saved, max((weight.nbytes for weight in layers), default=0)


def _weights(
    policy: Policy, options: RunOptions, processes: int, saved: int
) -> tuple[dict, dict, int]:
    """Bytes by part that stay on the device, bytes by part that come only to compute, and bytes of the gradients."""
    gradients = _bytes([p for p in policy.transformer.parameters() if p.requires_grad])
    old = _bytes([p for p in lora_parameters(policy) if not p.requires_grad])
    resident = {
        "transformer": _bytes(policy.transformer) - gradients - old - saved,
        "adapter" if options.use_lora else "trained weights": gradients,
        "old adapter": old,
        "optimizer": gradients // 2 if options.train.use_8bit_adam else 2 * gradients,
        "average": gradients if options.train.ema else 0,
    }
    if options.train.sharding == "fsdp2":
        for part in ("transformer",) if options.use_lora else resident:
            resident[part] //= processes
        gradients //= 1 if options.use_lora else processes
    parts = {
        "VAE": _bytes(policy.pipeline.vae),
        "text encoders": sum(map(_bytes, policy.text_encoders())),
    }
    if not options.speed.offload_vae:
        resident["VAE"] = parts.pop("VAE")
    return {part: size for part, size in resident.items() if size}, parts, gradients


def reward_bytes(options: RunOptions) -> dict[str, int]:
    """Bytes of local reward models on the device; rewards that use the same one share it."""
    found = {}
    for name in options.train.reward_fn | options.test.reward_fn:
        kwargs = (options.test.reward_fn_kwargs | options.train.reward_fn_kwargs).get(name, {})
        elsewhere = str(kwargs.get("device", "cuda")).startswith("cpu") or "server" in kwargs
        if name in REWARD_PARAMETERS and not elsewhere:
            model, parameters = REWARD_PARAMETERS[name]
            found[model] = (2 if kwargs.get("dtype") in ("float16", "bfloat16") else 4) * parameters
    return found


def build_judge(config: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The judge on ``meta`` as LLaMA-Factory prepares it, and LLaMA-Factory's ``ModelArguments``."""
    os.environ.setdefault("LLAMAFACTORY_VERBOSITY", "WARN")  # before it is imported
    from llamafactory.hparams import FinetuningArguments, ModelArguments
    from llamafactory.hparams.parser import _TRAIN_ARGS
    from llamafactory.model.adapter import init_adapter
    from llamafactory.model.model_utils.checkpointing import prepare_model_for_training
    from transformers import HfArgumentParser

    known = {field.name for kind in _TRAIN_ARGS for field in dataclasses.fields(kind)} | {
        "global_batch_size"
    }
    if unknown := [
        key for key in config if key not in known and not key.startswith("first_token_")
    ]:
        raise ConfigError(f"LLaMA-Factory has no argument {', '.join(unknown)}")
    kinds = HfArgumentParser((ModelArguments, FinetuningArguments))
    arguments, finetuning = kinds.parse_dict(config, allow_extra_keys=True)
    half = config.get("bf16") or config.get("fp16")
    model = judge_of(arguments.model_name_or_path, torch.bfloat16 if half else torch.float32)
    prepare_model_for_training(model, arguments)
    return init_adapter(model.config, model, arguments, finetuning, is_trainable=True), arguments


def estimate_judge(config: dict[str, Any], name: str, processes: int) -> Estimate:
    """Training on pairs of the largest images. The language model runs on fake tensors, the tower is computed."""
    from paco_reward.loss import answer_positions_only, find_answers, first_token_loss_func

    model, arguments = build_judge(config)
    rows = config.get("per_device_train_batch_size", 8)
    # an image's patches, and the tokens that each square of them becomes
    vision, width = model.config.vision_config, model.config.text_config.hidden_size
    square = vision.spatial_merge_size**2
    image_tokens = arguments.image_max_pixels // (square * vision.patch_size**2)
    patches = image_tokens * square
    tokens = min(2 * image_tokens + TEXT_TOKENS + ANSWER_TOKENS, config.get("cutoff_len", 2048))
    # the vision tower; a merger sees tokens, every other layer sees patches
    tower = next(module for part, module in model.named_modules() if part.endswith("visual"))
    weights = sum(
        p.numel() / (square if "merger" in part else 1) for part, p in tower.named_parameters()
    )
    whole = len(
        getattr(vision, "fullatt_block_indexes", range(vision.depth))
    )  # blocks that attend to the whole image
    seeing = 2 * weights * patches + 4 * whole * vision.hidden_size * patches**2
    features = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))  # of a token
    pixels = 4 * patches * 3 * vision.temporal_patch_size * vision.patch_size**2
    images = 2 * rows * (pixels + 2 * image_tokens * features * width)

    labels = torch.full((rows, tokens), -100)
    labels[:, -ANSWER_TOKENS:] = 0
    weight, scheme = config.get("first_token_weight"), config.get("first_token_scheme", "sequence")
    positions = torch.arange(tokens).expand(3, rows, tokens)
    device = FakeDevice("cpu")
    place(model, device, "cpu")

    def learn() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            given = {
                "inputs_embeds": model.get_input_embeddings()(torch.zeros_like(labels)),
                "position_ids": positions,
            }
            if weight is None:
                loss = model(**given, labels=labels).loss
            else:
                with answer_positions_only(
                    model.get_output_embeddings(), find_answers(labels).mask
                ):
                    outputs = {"logits": model(**given).logits.float()}
                loss = first_token_loss_func(outputs, labels, weight=weight, scheme=scheme)
        loss.backward()

    with fake_cpu(device):
        _add_gradients(model)
        micro_batch = measured(device, learn)
    trained = _bytes([p for p in model.parameters() if p.requires_grad])
    saved, layer = _quantized([model], arguments.quantization_bit)
    resident = {
        "weights": _bytes(model) - trained - saved,
        "trained weights": trained,
        "optimizer": trained // 2 if "8bit" in config.get("optim", "") else 2 * trained,
    }
    adds = {
        "micro-batch": {
            "images": images,
            "gradients": trained,
            "activations": micro_batch.peak + layer,
        }
    }
    pairs = 10_000 / processes
    work = [Work("see", 2 * pairs, seeing), Work("learn", pairs / rows, micro_batch.flops)]
    title = f"{name} on {processes} GPU(s): pairs of {tokens} tokens, {rows} at a time on each"
    return Estimate(title, {"10,000 pairs": work}, resident, adds)


def pairs_of(options: RunOptions) -> float:
    """Judge questions about an image: pairs of sub-figures, two for an edit, 0 without a judge."""
    names = options.train.reward_fn
    if "consistency_score" in names:
        items = load_prompts(str(ROOT / "PaCo-GRPO" / "dataset" / "T2IS"), "train", "geneval")
        grids = [split_prompt(item.prompt) for item in items]
        return statistics.mean(math.comb(grid.rows * grid.cols, 2) for grid in grids)
    return 2 if "consistency_for_editing" in names else 0


def split(
    found: Estimate, flops: float, pairs: float, rate: float, generating: int, serving: int
) -> dict[str, float]:
    """Seconds of an epoch; the judge starts after the first batch is sampled and cannot finish before the last one is.

    ``flops`` and ``rate`` (pairs) are of one GPU and second, ``pairs`` of one image.
    """
    plan, size = found.plan, found.plan.sample_batch_size
    # of an image
    seconds = {
        w.name: w.pieces * w.flops / flops / plan.samples_per_process
        for w in found.work["an epoch"]
    }
    share = math.ceil(plan.samples / generating)
    train = share * seconds.pop("train")
    first = min(size, share) * sum(seconds.values())
    batches = math.ceil(plan.samples / (generating * size))
    sample = batches * first
    judge = plan.samples * pairs / (serving * rate)
    wait = max(judge / batches, first + judge - sample)
    return {
        "sample": sample,
        "judge": judge,
        "wait": wait,
        "train": train,
        "epoch": sample + wait + train,
    }


def report(found: Estimate, memory: float, flops: float, card: str) -> bool:
    """Print work, memory and verdict; returns whether it fits."""
    print(f"{found.title}\n\n{'on each GPU':<13} {'pieces':>7} {'TFLOP each':>13} {'seconds':>9}")
    for name, works in found.work.items():
        for work in (*works, Work(name, 1, sum(w.pieces * w.flops for w in works))):
            seconds = work.pieces * work.flops / flops
            print(f"{work.name:<13} {work.pieces:>7.0f} {work.flops / 1e12:>13.2f} {seconds:>9.1f}")
        print()
    print(
        f"seconds: assumed {EFFICIENCY:.0%} of the stated {flops / EFFICIENCY / 1e12:.0f} TFLOPS; not measured\n"
    )
    print("GiB on a GPU\nresident: " + _parts(found.resident))
    totals = {
        phase: sum([*found.resident.values(), *parts.values()])
        for phase, parts in found.adds.items()
    }
    for phase, parts in found.adds.items():
        print(f"{phase:<12} {totals[phase] / GIB:6.1f}  + {_parts(parts)}")
    worst = max(totals, key=totals.__getitem__)
    spare = (memory - RESERVE - totals[worst]) / GIB
    peak = f"peak {totals[worst] / GIB:.1f} GiB ({worst}) + {RESERVE / GIB:.1f} for CUDA itself"
    print(f"\n{'fits' if spare >= 0 else 'does not fit'}: {peak} leave {spare:.1f} GiB of {card}")
    return spare >= 0


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def card_of(arguments: argparse.Namespace) -> tuple[str, float, float]:
    """Name, bytes, and FLOPs a second that it is assumed to reach."""
    name, label, share = arguments.gpu, arguments.gpu, 1.0
    if arguments.memory_gb:  # as sold: the known card with the nearest memory
        sold = {name: int(name.split()[-1].removesuffix("GB")) for name in GPUS}
        name = min(sold, key=lambda name: abs(sold[name] - arguments.memory_gb))
        label, share = f"a card of {arguments.memory_gb:g} GB", arguments.memory_gb / sold[name]
    gib, teraflops = GPUS[name]
    return label, gib * GIB * share, EFFICIENCY * teraflops * 1e12


def main(given: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", choices=GPUS, default="H100 80GB")
    parser.add_argument("--memory_gb", type=float, help="or the card's memory alone, as sold")
    parser.add_argument(
        "--processes", type=int, default=1, help="GPUs that share an epoch's images"
    )
    parser.add_argument("--judge", action="store_true", help="judge training: [YAML] [key=value …]")
    parser.add_argument("--gpus", type=int, help="GPUs to divide between generator and judge")
    parser.add_argument(
        "--judge_pairs_per_second",
        type=float,
        help="of a judge on one GPU (benchmarks/judge_load.py)",
    )
    arguments, rest = parser.parse_known_args(given)
    user_errors: tuple = (ConfigError, PolicyLoadError, DataError, ImportError, OSError)
    each, pairs = 0, 0.0  # GPUs that hold one judge; questions about an image
    card, memory, flops = card_of(arguments)
    try:
        if arguments.judge:
            from paco_reward.config import load_config
            from paco_reward.errors import PacoRewardError

            user_errors += (PacoRewardError,)
            file = Path(rest.pop(0)) if rest and Path(rest[0]).is_file() else PUBLISHED_JUDGE
            found = estimate_judge(load_config(file, rest), file.stem, arguments.processes)
        else:
            options, name = read_options(rest)
            if arguments.gpus and (pairs := pairs_of(options)):
                each = math.ceil(2 * JUDGE_PARAMETERS / (0.8 * memory))
                if arguments.gpus <= each:
                    raise ConfigError(
                        f"--gpus {arguments.gpus} is too few for a judge on {each} and a generator"
                    )
            found = estimate(
                options, name, arguments.gpus - each if arguments.gpus else arguments.processes
            )
    except user_errors as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fits = report(found, memory, flops, card)
    if pairs:
        rate = arguments.judge_pairs_per_second or flops / (2 * JUDGE_PARAMETERS * JUDGE_TOKENS)
        print(
            f"\njudge: {pairs:.1f} pairs an image, {rate:.0f} a second and GPU; {each} GPU(s) hold one"
        )
        serving = range(each, arguments.gpus, each)
        splits = {n: split(found, flops, pairs, rate, arguments.gpus - n, n) for n in serving}
        best = min(serving, key=lambda n: splits[n]["epoch"])
        print("generate serve" + "".join(f"{name + ' s':>9}" for name in splits[best]))
        for n, seconds in splits.items():
            values = "".join(f"{value:>9.1f}" for value in seconds.values())
            print(f"{arguments.gpus - n:>8} {n:>5}{values}{'  <- best' * (n == best)}")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
