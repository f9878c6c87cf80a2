"""An epoch of RL on fake tensors: every kind of work once, at the model's real shapes."""

import contextlib
import dataclasses
import math
import pkgutil
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from paco_grpo.architectures import pipeline_of
from paco_grpo.data.prompts import load_prompts
from paco_grpo.estimate import fake_device
from paco_grpo.estimate.fake_device import FakeDevice, Measured, fake_cpu, fake_cuda, measured
from paco_grpo.estimate.memory import (
    add_gradients,
    bytes_of,
    map_tensors,
    quantized,
    reward_bytes,
    weights_of,
)
from paco_grpo.estimate.planning import Estimate, Work
from paco_grpo.objectives import Objective, Step, create_objective
from paco_grpo.options import RunOptions
from paco_grpo.policies import POLICIES
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.training.build import add_adapters, policy_settings
from paco_grpo.training.plan import Plan, evaluation_images, make_plan
from paco_grpo.types import Item, Rollout
from paco_judge.errors import UserError

PROMPT = (
    "A 2x2 grid of images that show one fox in four seasons, "
    "watercolor on rough paper, soft morning light. "
) * 4


@dataclasses.dataclass
class SampledOnce:
    """What encoding one prompt, two denoising steps and decoding of its images cost."""

    encode: Measured
    denoise: Measured
    decode: Measured


@dataclasses.dataclass
class Pieces:
    """Every kind of work of an epoch, once."""

    policy: DiffusersPolicy
    training: SampledOnce
    evaluation: SampledOnce
    before_update: Measured  # the first pass over a micro-batch of an objective that has one
    update: Measured  # forward and backward of a micro-batch at one step

    @property
    def images(self) -> Rollout:
        """The sampled training batch."""
        return self.training.denoise.result


def estimate(options: RunOptions, name: str, processes: int = 1) -> Estimate:
    """What each of ``processes`` GPUs does in an epoch and an evaluation, and what it holds."""
    objective = create_objective(options.train)
    plan = make_plan(options, processes, objective.gradient_steps)
    pieces = measure_pieces(options, plan)
    images = evaluation_images(options, _num_test_items(options))
    test = options.test
    batches = math.ceil(images / (processes * test.batch_size))
    shown = pieces.evaluation
    evaluation = [
        Work.of("evaluate", batches * test.num_steps, shown.denoise, 1 / 2),
        Work.of("decode", batches, shown.decode),
    ]
    epoch = epoch_work(options, plan, pieces, objective)
    resident, adds = memory(options, plan, pieces)
    title = (
        f"{name} on {processes} GPU(s): {plan.samples} images an epoch "
        f"({plan.prompts} prompts x {plan.images_per_prompt}), sampled {plan.sample_batch_size} "
        f"and trained {options.train.batch_size} at a time; {images} in an evaluation"
    )
    work = {"an epoch": epoch, "an evaluation": evaluation}
    return Estimate(title, work, resident, adds, plan, options.speed.compile)


def measure_pieces(options: RunOptions, plan: Plan) -> Pieces:
    """Sample on a fake GPU, and train on a fake CPU, where PyTorch's autograd works."""
    train = dataclasses.replace(options.train, timesteps=(0,), num_sigmas=None)
    objective = create_objective(train)
    batch = min(train.batch_size, plan.samples_per_process)

    gpu = FakeDevice("cuda")
    policy = build_policy(options, gpu, "cuda:0")
    with fake_cuda(gpu):
        noise = _noise_of_first_step(options)
        training = _sample(
            policy, gpu, options, options.train.resolution, plan.sample_batch_size, noise
        )
        trained = training.denoise.result.select([0] * batch)
        # A loss that a GPU would refuse is refused here.
        objective.loss(_step(trained, objective), policy)
        evaluation = _sample(
            policy, gpu, options, options.test.resolution, options.test.batch_size, {}
        )

    cpu = FakeDevice("cpu")
    policy = build_policy(options, cpu, "cpu")
    with cpu.mode:
        step = _step(map_tensors(_on_cpu, trained), objective)
    with fake_cpu(cpu):
        add_gradients(policy.transformer)
        first_pass = getattr(objective, "error_change", lambda step, policy: None)
        before_update = measured(cpu, lambda: first_pass(step, policy))
        update = measured(cpu, lambda: objective.loss(step, policy).loss.sum().backward())
    return Pieces(policy, training, evaluation, before_update, update)


def build_policy(options: RunOptions, device: FakeDevice, on: str) -> DiffusersPolicy:
    """The policy with its adapters, as training builds it; its fake weights are ``on`` a device."""
    settings = dataclasses.replace(
        policy_settings(options, "meta"),
        max_sequence_length=options.max_sequence_length or 512,
        quantize=None,
    )
    pipeline = pipeline_of(options.pretrained.model, settings.dtype)
    policy_class = pkgutil.resolve_name(POLICIES[type(pipeline).__name__])
    policy = policy_class(pipeline, settings)
    # The shapes of an adapter to start from are those of a new one.
    train = dataclasses.replace(options.train, lora_path=None)
    objective = create_objective(train)
    with torch.device("meta"):
        add_adapters(policy, dataclasses.replace(options, train=train), objective)
    for module in (policy.transformer, policy.pipeline.vae, *policy.text_encoders()):
        fake_device.place(module, device, on)
    policy.device = torch.device(on)
    return policy


def _noise_of_first_step(options: RunOptions) -> dict[str, Any]:
    sample = options.sample
    is_noisy = bool(sample.noise_steps and sample.noise_level)
    return {
        "noise_steps": (0,) if is_noisy else (),
        "noise_level": sample.noise_level,
        "cps": sample.cps,
    }


def _sample(
    policy: DiffusersPolicy,
    device: FakeDevice,
    options: RunOptions,
    side: int,
    count: int,
    noise: dict[str, Any],
) -> SampledOnce:
    """Encode a text, take two steps for ``count`` images of side ``side``, decode them."""
    references = (Image.new("RGB", (side, side)),) if _edits(policy, options) else ()
    item = Item(0, PROMPT, side, side, references=references)
    encode = measured(device, lambda: policy.encode([item]))
    text = encode.result
    ids = [0] * count
    sampling = Sampling(num_steps=2, **noise)
    draws = Draws(ids, range(count), side, side)
    denoise = measured(device, lambda: rollout(policy, text.select(ids), draws, sampling))
    latents = denoise.result.clean_latents
    decode = measured(device, lambda: policy.decode(latents, side, side))
    return SampledOnce(encode, denoise, decode)


def _edits(policy: DiffusersPolicy, options: RunOptions) -> bool:
    has_references = options.prompt_fn in ("geneval_image", "arrow_editing")
    return policy.needs_image or (policy.edits_images and has_references)


def _step(sampled: Rollout, objective: Objective) -> Step:
    (index,) = objective.steps(sampled, np.random.default_rng(0))
    ones = torch.ones(len(sampled), device=sampled.clean_latents.device)
    return Step(sampled, index, ones, group_weights=ones)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor


def _num_test_items(options: RunOptions) -> int:
    """Items of the test set; one batch where the set is not on this machine."""
    with contextlib.suppress(UserError):
        return len(load_prompts(options.dataset, "test", options.prompt_fn))
    return options.test.batch_size


def epoch_work(options: RunOptions, plan: Plan, pieces: Pieces, objective: Objective) -> list[Work]:
    """The pieces of an epoch on each GPU."""
    train = options.train
    sampled = pieces.training
    steps = _num_trained_steps(options, pieces.images, objective) * train.num_inner_epochs
    micro_batches = math.ceil(plan.samples_per_process / train.batch_size)
    prompts = min(plan.prompts, plan.samples_per_process)
    forwards = plan.rollout_batches * _num_forwards(options, plan.sample_batch_size)
    work = [
        Work.of("encode", prompts, sampled.encode),
        Work.of("denoise", forwards, sampled.denoise, 1 / 2),
        Work.of("decode", plan.rollout_batches, sampled.decode),
        Work.of("train", micro_batches * steps, pieces.before_update) + pieces.update,
    ]
    probe_images = options.health.probe_images
    if probe_images and options.use_lora:
        share = 1 / 2 / plan.sample_batch_size
        work.append(Work.of("probe", probe_images, sampled.denoise, share))
    return work


def _num_noise_steps(options: RunOptions) -> int:
    sample = options.sample
    if not (sample.noise_steps and sample.noise_level):
        return 0
    return sample.num_noise_steps or len(sample.noise_steps)


def _num_forwards(options: RunOptions, batch: int) -> float:
    """Denoising steps that are computed for an image.

    Images that share their initial noise also share the steps before the noise steps.
    """
    sample = options.sample
    is_noisy = _num_noise_steps(options) > 0
    before = min(sample.noise_steps) if is_noisy else sample.num_steps
    tail = sample.num_steps - 1 - max(sample.noise_steps) if is_noisy else 0
    forwards = sample.num_steps - tail + min(tail, sample.tail_steps or tail)
    if sample.same_latent:
        sharing = min(batch, sample.num_images_per_prompt // sample.latents_per_prompt)
        forwards -= before * (1 - 1 / sharing)
    return forwards


def _num_trained_steps(options: RunOptions, images: Rollout, objective: Objective) -> int:
    sample = options.sample
    steps = sample.noise_steps[: _num_noise_steps(options)]
    noise_steps = [dataclasses.replace(images.noise_steps[0], index=step) for step in steps]
    schedule = dataclasses.replace(
        images, sigmas=range(sample.num_steps + 1), noise_steps=noise_steps
    )
    return len(objective.steps(schedule, np.random.default_rng(0)))


def memory(
    options: RunOptions, plan: Plan, pieces: Pieces
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Bytes that stay on the device, and bytes that each phase adds at its peak, both by part."""
    policy = pieces.policy
    sampled = pieces.training
    shown = pieces.evaluation
    blocks = [part for part in policy.transformer.children() if isinstance(part, nn.ModuleList)]
    saved, layer = quantized(blocks, 4 if options.pretrained.quantize else None)
    weights = weights_of(policy, options, plan.num_processes, saved)
    gradients = weights.gradients
    vae = weights.offloaded.get("VAE", 0)
    moved = weights.offloaded.get("text encoders", 0)
    if _edits(policy, options):
        moved += vae
    records = _record_bytes(options, plan, pieces)
    activations = max(pieces.update.peak, pieces.before_update.peak)
    in_one_message = gradients if plan.num_processes > 1 else 0
    adds = {
        "encode": {"weights": moved, "activations": sampled.encode.peak},
        "sample": {
            "records": records,
            "denoising": sampled.denoise.peak + layer,
            "decoding meanwhile": sampled.decode.peak + vae,
        },
        "train": {
            "records": records,
            "gradients": gradients,
            "activations": activations + layer,
        },
        "update": {
            "records": records,
            "gradients": gradients,
            "gradients in one message": in_one_message,
        },
        "evaluate": {"denoising": shown.denoise.peak + layer},
        "show": {"decoding": shown.decode.peak + vae},
    }
    return weights.resident | reward_bytes(options), adds


def _record_bytes(options: RunOptions, plan: Plan, pieces: Pieces) -> int:
    """Bytes of an epoch's latents and texts."""
    images = pieces.images
    kept = bytes_of(images) - bytes_of(images.conditioning)
    recorded = sum(bytes_of(step) for step in images.noise_steps)  # nothing without noise
    per_image = (kept + (_num_noise_steps(options) - 1) * recorded) // plan.sample_batch_size
    texts = min(plan.prompts, plan.samples_per_process)
    return per_image * plan.samples_per_process + bytes_of(pieces.training.encode.result) * texts
