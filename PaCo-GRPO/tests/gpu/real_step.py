"""An epoch of the trainer itself at the real size on a fake GPU."""

import contextlib
import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fake_gpu import GIB, ON_GPU, FakeGPU, fake_gpu, kind
from named import CONFIG
from tiny_run import write_edits

from epoch import CHANGES
from paco_grpo import architectures
from paco_grpo.estimate import fake_device
from paco_grpo.estimate.generator import NF4, estimate, example
from paco_grpo.estimate.report import GPUS
from paco_grpo.options import RunOptions, read_options
from paco_grpo.policies import Policy
from paco_grpo.policies.loading import policy_of
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.training.build import build_run
from paco_grpo.training.run import Run
from paco_grpo.training.trainer import Trainer
from paco_grpo.types import Rollout

CARDS = {"_24gb": "RTX 4090 24GB", "_48gb": "L40S 48GB"}  # by suffix; else an H100


def distinct():
    """A reward whose scores are all different."""
    numbers = iter(range(10**6))
    return lambda images, items: np.array([float(next(numbers)) for _ in images])


def options_of(name: str, folder: Path) -> RunOptions:
    """The configuration with two micro-batches or more, two denoising steps, one optimizer step."""
    words = ["--config", f"{CONFIG}/grpo.py:{name}"]
    options, _ = read_options(words)
    images = max(options.sample.batch_size, 2 * options.train.batch_size)
    changes = CHANGES | {
        "save_dir": folder / "runs",
        "run_name": "run",
        "dataset": "dataset/T2IS",
        "prompt_fn": "geneval",
        "item_size": "aspect",  # T2IS states sizes
        "health.probe_images": 1,
        "speed.compile": False,
        "sample.unique_sample_num_per_epoch": 1,
        "sample.num_images_per_prompt": images,
        "sample.num_steps": 2,
        "sample.noise_steps": "()",
        "sample.num_noise_steps": None,
        "sample.tail_steps": None,
        "train.gradient_step_per_epoch": 1,
        "train.reward_fn": {"real_step:distinct": 1.0},
    }
    if options.sample.noise_level:
        changes |= {"sample.noise_steps": "(0,)", "train.timesteps": None}
    else:
        changes |= {"train.num_sigmas": 1, "train.sigma_one": True}  # of two steps, the first
    if options.prompt_fn == "arrow_editing":
        write_edits(folder / "edits")
        changes |= {"dataset": folder / "edits", "prompt_fn": "geneval_image"}
    return read_options([*words, *(f"--config.{key}={changes[key]}" for key in changes)])[0]


def few_blocks(model: str, count: int | None) -> contextlib.AbstractContextManager[None]:
    """The real width with ``count`` blocks (None: all)."""
    return architectures.with_blocks(model, count) if count else contextlib.nullcontext()


class Unpack(torch.autograd.Function):
    """A product with weights in 4 bits: each pass decodes them."""

    @staticmethod
    def forward(context, x, shape):
        context.shape = shape
        return x @ torch.empty(shape, dtype=x.dtype, device=x.device).T

    @staticmethod
    def backward(context, gradient):
        weight = torch.empty(context.shape, dtype=gradient.dtype, device=gradient.device)
        return gradient @ weight, None


class Packed(torch.nn.Linear):
    """The bytes of bitsandbytes' layer, whose own class of parameters cannot be fake."""

    def __init__(self, layer: torch.nn.Linear, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features)
        num_bytes = int(layer.weight.numel() * NF4)
        packed = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = Unpack.apply(x.to(self.dtype), (self.out_features, self.in_features))
        return product if self.bias is None else product + self.bias.to(self.dtype)


@contextlib.contextmanager
def fake_weights(model: str, gpu: FakeGPU) -> Iterator[None]:
    """Inside the context, the policy of ``model`` gets fake weights in main memory."""
    policy_class = policy_of(architectures.class_of(model))

    def from_pretrained(path: Path, settings: Any) -> Any:
        pipeline = architectures.pipeline_of(model, settings.dtype)
        for module in pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                fake_device.place(module, gpu, "cpu")
        return policy_class(pipeline, settings)

    with (
        mock.patch.object(policy_class, "from_pretrained", from_pretrained),
        mock.patch("paco_grpo.policies.memory._quantized", Packed),
    ):
        yield


def main(name: str, blocks: int | None) -> dict[str, Any]:
    """Peaks of an epoch's phases in GiB, and those of the estimate of the same run.

    With ``blocks`` of each kind (None: all), on the card of the configuration's suffix.

    Raises:
        AssertionError: A tensor has another data type or device than it should, or is missing.
    """
    suffix = next(filter(name.__contains__, CARDS), None)
    gib = GPUS[CARDS.get(suffix, "H100 80GB")][0]
    with tempfile.TemporaryDirectory() as place:
        options = options_of(name, Path(place))
        model = options.pretrained.model
        with few_blocks(model, blocks):
            estimated = estimate(options, name, 1, gib * GIB)
            written = str(architectures.write(model, Path(place) / "model"))
            pretrained = dataclasses.replace(options.pretrained, model=written)
            options = dataclasses.replace(options, pretrained=pretrained)
            with fake_gpu(gib) as gpu, fake_weights(model, gpu):
                peaks = observed(build_run(options), gpu)
    total = estimated.peaks
    expected = {
        "sample": max(total["encode"], total["sample"]) / GIB,
        "train": max(total["train"], total["update"]) / GIB,
        "evaluate": max(total["evaluate"], total["show"]) / GIB,
    }
    return {"name": name, "blocks": blocks, "card": gib, "peaks": peaks, "estimated": expected}


def observed(run: Run, gpu: FakeGPU) -> dict[str, float]:
    """Peaks of an epoch, in GiB; data types and devices are as they should be."""
    trainer = Trainer(run)
    state = run.state
    policy = state.policy
    peaks: dict[str, float] = {}
    gradients: Counter[str] = Counter()

    def watched(phase: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            gpu.peak = gpu.live
            result = function(*args, **kwargs)
            peaks[phase] = gpu.peak / GIB
            return result

        return call

    finish_gradients = state.strategy.finish_gradients

    def counted(parameters: Any, max_norm: float) -> Any:
        gradients.update(kind(parameter.grad) for parameter in parameters)
        return finish_gradients(parameters, max_norm)

    state.strategy.finish_gradients = counted
    trainer._sample = watched("sample", trainer._sample)
    run.updater.update = watched("train", run.updater.update)
    for parameter in state.parameters.values():  # as after a first step, which makes the moments
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    run.probe.prepare()
    decoded_on: set[str] = set()
    decoder = policy.pipeline.vae.decoder
    decoder.register_forward_pre_hook(lambda _, inputs: decoded_on.add(inputs[0].device.type))
    trainer.epoch()
    run.close()
    watched("evaluate", evaluate)(run)
    count = len(state.parameters)
    # Nothing reads what the last block of Qwen-Image writes to the text: three layers, A and B.
    unread = 6 if "QwenImageTransformer" in type(policy.transformer).__name__ else 0
    assert gradients == Counter({ON_GPU: count - unread, "missing": unread})
    moments = [value for values in state.optimizer.state.values() for value in values.values()]
    tensors = [*state.parameters.values(), *state.ema.shadow.values(), *moments]
    assert Counter(map(kind, tensors)) == {ON_GPU: 5 * count}  # three of them moments
    assert decoded_on == {"cuda"}
    expected = {"torch.bfloat16 cuda:0"}
    expected.add("torch.float32 cpu" if run.options.speed.offload_vae else ON_GPU)
    if run.options.pretrained.quantize:
        expected.add("torch.uint8 cuda:0")
    if state.snapshots:
        expected.add(ON_GPU)
    weights = [*policy.transformer.parameters(), *policy.pipeline.vae.parameters()]
    assert {kind(weight) for weight in weights if not weight.requires_grad} == expected
    return peaks


def evaluate(run: Run) -> None:
    """A batch at the evaluation's size, with the averaged weights."""
    policy = run.state.policy
    side = run.options.test.resolution
    with run.state.ema.applied():
        latents = sampled(policy, run.options, side, run.options.test.batch_size).clean_latents
        policy.decode(latents, side, side)


def sampled(policy: Policy, options: RunOptions, side: int, count: int, **noise: Any) -> Rollout:
    """Two denoising steps of ``count`` images."""
    ids = [0] * count
    text = policy.encode([example(policy, options, side)]).select(ids)
    draws = Draws(ids, range(count), side, side)
    return rollout(policy, text, draws, Sampling(num_steps=2, **noise))
