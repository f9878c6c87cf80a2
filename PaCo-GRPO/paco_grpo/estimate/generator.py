"""An epoch of RL on fake tensors: every kind of work once, at the model's real shapes."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import nn

from paco_grpo.architectures import class_of, pipeline_of
from paco_grpo.data.sets import has_references, load_items, prompt_sets
from paco_grpo.distributed import Strategy, blocks_of, gathered_dtype
from paco_grpo.estimate import fake_device
from paco_grpo.estimate.fake_device import FakeDevice, Measured, fake_cpu, measured
from paco_grpo.objectives import Group, Objective, Step, create_objective
from paco_grpo.options import RunOptions
from paco_grpo.policies.adapters import add_adapters
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.policies.loading import needed_length, policy_of, policy_settings
from paco_grpo.policies.lora import lora_parameters
from paco_grpo.policies.memory import quantizable
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.training.resolve import resolve_defaults
from paco_grpo.training.state import Plan, make_plan
from paco_grpo.types import Conditioning, Item, Rollout
from paco_judge.errors import UserError

PROMPT = (
    "A 2x2 grid of images that show one fox in four seasons, "
    "watercolor on rough paper, soft morning light. "
) * 4
# Parameters of rewards that load a model on the device of the process.
_VIT_H = ("OpenCLIP ViT-H-14", 986_109_441)
REWARD_PARAMETERS = {
    "subfig_clipT": _VIT_H,
    "subfig_clipI": _VIT_H,
    "reference_clipI": _VIT_H,
    "pickscore": ("PickScore", _VIT_H[1]),
    "clipscore": ("CLIP ViT-L/14", 427_616_513),
}
# Bytes a weight in nf4: 4 bits, 8 bits for 64 weights, a float32 for 256 of these.
NF4 = 1 / 2 + 1 / 64 + 1 / 4096
# CUDA context and libraries, workspaces of cuBLAS and cuDNN, fragmentation.
RESERVE = 3 * 2**29
_GPUS_OF_A_MACHINE = 8  # FSDP2 shards inside a machine


@dataclass
class Estimate:
    """What one GPU does and holds."""

    title: str
    epoch: dict[str, float]  # FLOPs of an epoch, by phase
    evaluation: float | None  # FLOPs of an evaluation; None: its prompts are not there
    resident: dict[str, int]  # bytes that stay on the device, by part
    adds: dict[str, dict[str, int]]  # bytes that a phase adds at its peak, by part

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes in use, by phase."""
        resident = sum(self.resident.values())
        return {phase: resident + sum(parts.values()) for phase, parts in self.adds.items()}


@dataclass
class SampledOnce:
    """What encoding one prompt, two denoising steps and decoding of its images cost."""

    encode: Measured
    denoise: Measured
    decode: Measured


@dataclass
class Pieces:
    """Every kind of work of an epoch, once."""

    policy: DiffusersPolicy
    text_tokens: int  # in training
    training: SampledOnce
    evaluation: SampledOnce
    record: Rollout  # a batch of the epoch, all of its steps
    forwards: int  # of the transformer in it
    trained_steps: Sequence[int]
    before_update: Measured  # the first pass over a micro-batch of an objective that has one
    frozen: int  # bytes of a sample at one step that the first pass keeps for the update
    share_kept: float  # of an epoch's images, which the objective trains
    update: Measured  # forward and backward of a micro-batch at one step


def estimate(options: RunOptions, name: str, processes: int, gpu_bytes: float) -> Estimate:
    """What each of ``processes`` GPUs does in an epoch, and what it holds of ``gpu_bytes``."""
    pretrained = options.pretrained
    options = resolve_defaults(options, policy_of(class_of(pretrained.model), pretrained.policy))
    objective = create_objective(options)
    plan = make_plan(options, processes, objective.gradient_steps)
    pieces = measure_pieces(options, plan, objective)
    title = (
        f"{name} on {processes} GPU(s): {plan.samples} images an epoch "
        f"({plan.prompts} prompts x {plan.images_per_prompt}), sampled {plan.sample_batch_size} "
        f"and trained {options.train.batch_size} at a time; "
        f"{pieces.text_tokens} text tokens, in evaluations {pieces.policy.max_sequence_length}"
    )
    resident, adds = memory(options, plan, pieces, gpu_bytes)
    epoch = epoch_flops(options, plan, pieces)
    return Estimate(title, epoch, evaluation_flops(options, plan, pieces), resident, adds)


def measure_pieces(options: RunOptions, plan: Plan, objective: Objective) -> Pieces:
    """Sample, evaluate and train once."""
    device = FakeDevice()
    policy = build_policy(options, device, "cpu")
    sample = options.sample
    test = options.test
    _, tokens = text_lengths(policy, options)
    item = example(policy, options, options.train.resolution)
    shown = example(policy, options, test.resolution)
    # Another text, because a policy keeps what it encoded.
    shown = dataclasses.replace(shown, prompt=PROMPT.upper())
    noise = {}
    if sample.noise_steps:
        noise = {
            "noise_steps": (0,),
            "noise_level": sample.noise_level,
            "transition": sample.transition,
        }
    batch = plan.sample_batch_size
    with fake_cpu(device):
        # FSDP2 gathers weights in the precision in which they compute; otherwise they are float32.
        is_sharded = options.train.sharding == "fsdp2" and plan.num_processes > 1
        if not is_sharded or gathered_dtype(policy) == torch.float32:
            Strategy(accelerator=None).place(policy)
        training = _sample(policy, device, item, tokens, batch, Sampling(num_steps=2, **noise))
        evaluation = _sample(
            policy,
            device,
            shown,
            policy.max_sequence_length,
            test.batch_size,
            Sampling(num_steps=2),
        )
        record, forwards = epoch_record(policy, objective, training.encode.result, item, batch)
        steps = objective.steps(record, np.random.default_rng(0))
        micro_batch = min(options.train.batch_size, plan.samples_per_process)
        step = one_step(record, steps[0], micro_batch)
        for parameter in policy.transformer.parameters():
            if parameter.requires_grad:  # gradients are counted apart
                parameter.grad = torch.zeros_like(parameter)
        before_update = measured(device, lambda: compare(objective, step, policy))
        frozen = bytes_of(list(step.frozen.values())) // micro_batch
        update = measured(device, lambda: objective.loss(step, policy).loss.sum().backward())
    return Pieces(
        policy=policy,
        text_tokens=tokens,
        training=training,
        evaluation=evaluation,
        record=record,
        forwards=forwards,
        trained_steps=steps,
        before_update=before_update,
        frozen=frozen,
        share_kept=share_kept(objective, plan),
        update=update,
    )


def build_policy(options: RunOptions, device: FakeDevice, on: str) -> DiffusersPolicy:
    """The policy with its adapters, before it is placed; its fake weights are ``on`` a device."""
    settings = dataclasses.replace(policy_settings(options, "meta"), quantize=None)
    pipeline = pipeline_of(options.pretrained.model, settings.dtype)
    policy = policy_of(type(pipeline), options.pretrained.policy)(pipeline, settings)
    # The shapes of an adapter to start from are those of a new one.
    train = dataclasses.replace(options.train, lora_path=None)
    options = dataclasses.replace(options, train=train)
    objective = create_objective(options)
    with torch.device("meta"):
        names = [snapshot.name for snapshot in objective.snapshots]
        # The objective's adapters have these shapes, too.
        add_adapters(policy, options, [*names, *objective.adapters], {})
    for module in (policy.transformer, policy.pipeline.vae, *policy.text_encoders()):
        fake_device.place(module, device, on)
    policy.device = torch.device(on)
    policy.max_sequence_length, _ = text_lengths(policy, options)
    return policy


def text_lengths(policy: DiffusersPolicy, options: RunOptions) -> tuple[int, int]:
    """Text tokens in evaluations and in training, by a tokenizer about as fine as the real one."""
    longest = options.max_sequence_length
    training = options.train.max_sequence_length
    if 0 in (longest, training):
        tokenizer = getattr(policy.pipeline, policy.tokenizer_folder)
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        sets = prompt_sets(options)
        items = [*load_items(sets, "train"), *load_items(sets, "test")]
        prompts = {item.prompt for item in items} | {options.sample.negative_prompt or ""}
        counts = [policy.count_tokens(tokenizer, prompt) for prompt in prompts]
        needed = needed_length(counts, policy.text_limit)
        longest = longest or needed
        if training == 0:
            training = min(needed, longest)
    return longest, longest if training is None else training


def example(policy: DiffusersPolicy, options: RunOptions, side: int) -> Item:
    """An item of the run, with a reference image where it edits."""
    references = (Image.new("RGB", (side, side)),) if _edits(policy, options) else ()
    return Item(0, PROMPT, side, side, references=references)


def _sample(
    policy: DiffusersPolicy,
    device: FakeDevice,
    item: Item,
    text_tokens: int,
    count: int,
    sampling: Sampling,
) -> SampledOnce:
    """Encode a text, take the steps for ``count`` images of ``item``, decode them."""
    encode = measured(device, lambda: policy.encode([item], text_tokens))
    text = encode.result
    ids = [0] * count
    side = item.height
    draws = Draws(ids, range(count), side, side)
    denoise = measured(device, lambda: rollout(policy, text.select(ids), draws, sampling))
    latents = denoise.result.clean_latents
    decode = measured(device, lambda: policy.decode(latents, side, side))
    return SampledOnce(encode, denoise, decode)


def _edits(policy: DiffusersPolicy, options: RunOptions) -> bool:
    return policy.needs_image or (policy.edits_images and has_references(options))


def epoch_record(
    policy: DiffusersPolicy, objective: Objective, text: Conditioning, item: Item, count: int
) -> tuple[Rollout, int]:
    """A batch of an epoch, sampled without the transformer, and its number of forwards.

    Steps that images of one initial noise share count for each of them.
    """
    sample = objective.options.sample
    sampling = Sampling(
        num_steps=sample.num_steps,
        noise_steps=objective.noise_steps(epoch=0),
        noise_level=sample.noise_level,
        transition=sample.transition,
        tail_steps=sample.tail_steps,
    )
    ids = [0] * count
    draws = Draws(ids, range(count), item.height, item.width)
    with mock.patch.object(policy, "velocity", side_effect=lambda x, *_: x) as velocity:
        record = rollout(policy, text.select(ids), draws, sampling)
    return record, velocity.call_count


def one_step(sampled: Rollout, index: int, count: int) -> Step:
    """A training step of ``count`` samples at position ``index`` of the schedule."""
    trained = sampled.select([0] * count)
    ones = torch.ones(count, device=trained.clean_latents.device)
    return Step(trained, index, ones)


def share_kept(objective: Objective, plan: Plan) -> float:
    """The share of an epoch's images that the objective trains, with random advantages."""
    item_ids = np.repeat(np.arange(plan.prompts), plan.images_per_prompt)
    advantages = np.random.default_rng(0).standard_normal(len(item_ids))
    return float(objective.keep(advantages, item_ids).mean())


@torch.no_grad()
def compare(objective: Objective, step: Step, policy: DiffusersPolicy) -> None:
    """The first pass over a micro-batch, of objectives that compare the images of a group.

    Afterwards ``step`` has what the loss reads.
    """
    if not objective.whole_groups:
        return
    measures = {name: np.zeros((2, 1)) for name in objective.measure(step, policy)}
    values = objective.per_group(Group(0, np.array([-1.0, 1.0]), measures))
    step.group = dict.fromkeys(values, step.advantages)


# --- FLOPs ----------------------------------------------------------------------------------------


def epoch_flops(options: RunOptions, plan: Plan, pieces: Pieces) -> dict[str, float]:
    """FLOPs of an epoch on each GPU, by phase."""
    train = options.train
    sampled = pieces.training
    kept = pieces.share_kept * plan.samples_per_process
    micro_batches = math.ceil(kept / train.batch_size)
    updates = micro_batches * len(pieces.trained_steps) * train.num_inner_epochs
    forwards = plan.rollout_batches * pieces.forwards
    return {
        "encode": min(plan.prompts, plan.samples_per_process) * sampled.encode.flops,
        "denoise": forwards * sampled.denoise.flops / 2,
        "decode": plan.rollout_batches * sampled.decode.flops,
        "train": updates * (pieces.before_update.flops + pieces.update.flops),
    }


def evaluation_flops(options: RunOptions, plan: Plan, pieces: Pieces) -> float | None:
    """FLOPs of an evaluation on each GPU; None: the number of its images is unknown."""
    test = options.test
    try:
        items = len(load_items(prompt_sets(options), "test"))
    except UserError:
        return None
    shown = pieces.evaluation
    images = test.num_images or items
    batches = math.ceil(math.ceil(images / plan.num_processes) / test.batch_size)
    forwards = batches * test.num_steps / 2
    texts = min(images, items) / plan.num_processes * shown.encode.flops
    return texts + forwards * shown.denoise.flops + batches * shown.decode.flops


# --- memory ---------------------------------------------------------------------------------------


def memory(
    options: RunOptions, plan: Plan, pieces: Pieces, gpu_bytes: float
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Bytes that stay on the device, and bytes that each phase adds at its peak, both by part."""
    policy = pieces.policy
    sampled = pieces.training
    shown = pieces.evaluation
    weights = bytes_to_compute(options, policy, plan.num_processes)
    resident, offloaded, gradients = weight_bytes(options, policy, plan.num_processes, gpu_bytes)
    vae = offloaded.get("VAE", 0)
    moved = offloaded.get("text encoders", 0)
    if _edits(policy, options):  # first the text encoders, then the VAE
        moved = max(moved, vae)
    texts = min(plan.prompts, plan.samples_per_process)
    latents = bytes_of(pieces.record) - bytes_of(pieces.record.conditioning)
    records = latents // plan.sample_batch_size * plan.samples_per_process
    records += bytes_of(sampled.encode.result) * texts
    kept_per_step = math.ceil(pieces.share_kept * plan.samples_per_process / plan.gradient_steps)
    frozen = pieces.frozen * len(pieces.trained_steps) * kept_per_step
    activations = max(pieces.update.peak, pieces.before_update.peak)
    in_one_message = gradients if plan.num_processes > 1 else 0
    aside = gradients if options.train.ema else 0  # while the averaged weights are in their place
    adds = {
        "encode": {"weights": moved, "activations": sampled.encode.peak},
        "sample": {
            "records": records,
            "activations": max(sampled.denoise.peak + weights, sampled.decode.peak + vae),
        },
        "train": {
            "records": records + frozen,
            "gradients": gradients,
            "activations": activations + weights,
        },
        "update": {
            "records": records,
            "gradients": gradients,
            "gradients in one message": in_one_message,
        },
        "evaluate": {
            "trained weights set aside": aside,
            "activations": max(shown.denoise.peak + weights, shown.encode.peak + moved),
        },
        "show": {"trained weights set aside": aside, "decoding": shown.decode.peak + vae},
    }
    return resident | reward_bytes(options), adds


def bytes_to_compute(options: RunOptions, policy: DiffusersPolicy, processes: int) -> int:
    """Bytes of the weights that exist only while a layer or block computes."""
    if options.pretrained.quantize:
        return max(linear.weight.nbytes for _, linear in quantizable(policy.transformer))
    if options.train.sharding != "fsdp2" or processes == 1:
        return 0
    blocks = [base_bytes(block) for block in blocks_of(policy.transformer)]
    # The others are there from the beginning of the forward to the end of the backward.
    others = base_bytes(policy.transformer) - sum(blocks)
    # The message that brings a block's weights, the weights, and if they are trained, gradients.
    return others + (2 if options.use_lora else 3) * max(blocks)


def base_bytes(module: nn.Module) -> int:
    """Bytes of the weights of ``module`` without its adapters."""
    return bytes_of([p for name, p in module.named_parameters() if "lora_" not in name])


def weight_bytes(
    options: RunOptions, policy: DiffusersPolicy, processes: int, gpu_bytes: float
) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of weights and training state on each of ``processes`` GPUs, by part.

    Returns:
        What stays on the device, what comes only to compute, and the gradients.
    """
    speed = options.speed
    parameters = [p for p in policy.transformer.parameters() if p.requires_grad]
    trained = 4 * sum(parameter.numel() for parameter in parameters)  # float32
    adapters = lora_parameters(policy).values()
    old_adapter = bytes_of([p for p in adapters if not p.requires_grad])
    transformer = bytes_of(policy.transformer) - bytes_of(parameters) - old_adapter
    if options.pretrained.quantize:
        for _, linear in quantizable(policy.transformer):
            transformer -= int(linear.weight.nbytes - linear.weight.numel() * NF4)
    # As ``fits_beside_training`` decides: after the rewards were loaded, and before there are an
    # optimizer and an average.
    vae_bytes = bytes_of(policy.pipeline.vae)
    text_bytes = sum(map(bytes_of, policy.text_encoders()))
    rewards = sum(reward_bytes(options).values())
    generator = transformer + trained + old_adapter + vae_bytes + text_bytes
    free = gpu_bytes - RESERVE - rewards - generator
    name = "adapter" if options.use_lora else "trained weights"
    resident = {
        "transformer": transformer,
        name: trained,
        "old adapter": old_adapter,
        "optimizer": trained // 2 if options.train.use_8bit_adam else 2 * trained,
        "average": trained if options.train.ema else 0,
    }
    if options.train.sharding == "fsdp2":
        for part in ["transformer"] if options.use_lora else list(resident):
            resident[part] //= min(processes, _GPUS_OF_A_MACHINE)
    gradients = resident[name]
    offloads_text = free < gpu_bytes / 2 if speed.offload_text is None else speed.offload_text
    offloaded: dict[str, int] = {}
    (offloaded if speed.offload_vae else resident)["VAE"] = vae_bytes
    (offloaded if offloads_text else resident)["text encoders"] = text_bytes
    resident = {part: size for part, size in resident.items() if size}
    return resident, offloaded, gradients


def reward_bytes(options: RunOptions) -> dict[str, int]:
    """Bytes of local reward models on the device; rewards share one of the same precision."""
    sizes: dict[str, dict[int, int]] = {}  # model → bytes by those of a weight
    for prompt_set in prompt_sets(options):
        for name, kwargs in [*prompt_set.test.kwargs.items(), *prompt_set.train.kwargs.items()]:
            is_elsewhere = str(kwargs.get("device", "cuda")).startswith("cpu") or "server" in kwargs
            if name in REWARD_PARAMETERS and not is_elsewhere:
                model, parameters = REWARD_PARAMETERS[name]
                width = 2 if kwargs.get("dtype") in ("float16", "bfloat16") else 4
                sizes.setdefault(model, {})[width] = width * parameters
    return {model: sum(of_model.values()) for model, of_model in sizes.items()}


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a module, a list or a batch."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    return sum(map(bytes_of, value)) if isinstance(value, list) else 0
