"""What each phase of an epoch holds in memory, computed by running the policy's own code on the meta device.

Nothing is allocated: what a phase adds to the resident parameters is followed operation by operation (``live_bytes``).
Encoding, sampling and training use the policy and the objective of a real run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from measuring.live_bytes import LiveBytes, MetaAutocast, SavedBytes, bytes_of
from paco_grpo.data.prompts import round_to_multiple
from paco_grpo.objectives import get_objective
from paco_grpo.objectives.base import Step
from paco_grpo.options import RunOptions
from paco_grpo.policies import Policy
from paco_grpo.policies.base import unwrap
from paco_grpo.policies.lora import add_lora, add_snapshot, trainable_parameters
from paco_grpo.policies.performance import quantize
from paco_grpo.rehearsal.models import build, policy_of
from paco_grpo.types import Conditioning, NoiseStep, Rollout

META = torch.device("meta")
# Parameters of rewards that load a float32 model on the device of the process.
REWARD_PARAMETERS = {
    "subfig_clipT": 986_109_441,  # OpenCLIP ViT-H-14
    "subfig_clipI": 986_109_441,
    "pickscore": 986_109_441,  # the same architecture, other weights
    "clipscore": 427_616_513,  # CLIP ViT-L/14
}


def _policy(options: RunOptions, made_on: torch.device, device: torch.device, **more) -> Policy:
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    pipeline = build(options.pretrained.model, dtype, made_on)
    return policy_of(
        pipeline,
        dtype=dtype,
        device=device,
        max_sequence_length=options.max_sequence_length,
        guidance_scale=options.sample.guidance_scale,
        negative_prompt=options.sample.negative_prompt,
        **more,
    )


def meta_policy(options: RunOptions) -> Policy:
    """The generator of ``options`` with its adapters, on the meta device."""
    policy = _policy(options, META, META)
    imitate_accelerator(policy, options.enable_gradient_checkpointing)
    with META:
        if options.use_lora:
            add_lora(policy, options.train.lora_rank, options.train.lora_alpha, options.train.lora_targets)
        else:
            policy.transformer.float().requires_grad_(True)
        for snapshot in get_objective(options.train.loss_type).snapshots:
            add_snapshot(policy, snapshot.name)
    return policy


def random_policy(options: RunOptions, device: torch.device) -> Policy:
    """The same generator with weights as each class initializes them, on ``device`` (quantized there, layer by layer)."""
    kind = options.pretrained.quantize
    policy = _policy(options, torch.device("cpu") if kind else device, device, quantize=kind)
    if options.use_lora:
        add_lora(policy, options.train.lora_rank, options.train.lora_alpha, options.train.lora_targets)
    if options.enable_gradient_checkpointing:
        policy.transformer.enable_gradient_checkpointing()
    policy.offload(text_encoders=options.speed.offload_text_encoders is not False, vae=options.speed.offload_vae)
    return policy


def imitate_accelerator(policy: Policy, checkpointing: bool) -> None:
    """Imitate autocast and fused attention on the meta device, also when gradient checkpointing recomputes a block."""
    low = None if policy.dtype == torch.float32 else policy.dtype
    policy.autocast = lambda: MetaAutocast(low)
    if checkpointing:
        again = partial(
            checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), MetaAutocast(low)),
            preserve_rng_state=False,
        )  # fmt: skip
        policy.transformer.enable_gradient_checkpointing(lambda block, *args: again(block.__call__, *args))


# --- resident parts ---------------------------------------------------------------------------------------------------


def resident(policy: Policy, options: RunOptions) -> dict[str, int]:
    """Bytes that stay on the accelerator for the whole epoch, by part."""
    trained = sum(p.numel() for p in trainable_parameters(policy))
    adapters = sum(p.numel() for n, p in policy.transformer.named_parameters() if ".lora_" in n)
    snapshots = adapters - trained if options.use_lora else 0
    base = bytes_of(policy.transformer) - 4 * (trained + snapshots)
    if options.pretrained.quantize:
        for _, layer in _base_layers(policy):
            size = layer.weight.numel() * layer.weight.element_size()
            base += quantize.stored_bytes(layer, options.pretrained.quantize) - size
    parts = {
        "transformer": base,
        "adapter": 4 * trained,
        "optimizer": (2 if options.train.use_8bit_adam else 8) * trained,
    }
    if options.train.ema:
        parts["average"] = 4 * trained
    if snapshots:
        parts["old adapter"] = 4 * snapshots
    if options.speed.offload_text_encoders is False:  # None: off the accelerator, where that is CUDA
        parts["text encoders"] = sum(map(bytes_of, policy.text_encoders()))
    if not options.speed.offload_vae:
        parts["VAE"] = bytes_of(policy.pipeline.vae)
    if rewards := reward_bytes(options):
        parts["rewards"] = rewards
    return parts


def reward_bytes(options: RunOptions) -> int:
    """Bytes of local reward models on the accelerator; the two OpenCLIP rewards share one model."""
    found = set()
    for name in {*options.train.reward_fn, *options.test.reward_fn}:
        kwargs = options.train.reward_fn_kwargs.get(name, {})
        elsewhere = str(kwargs.get("device", "cuda")).startswith("cpu") or "server" in kwargs
        if name in REWARD_PARAMETERS and not elsewhere:
            found.add("OpenCLIP" if name.startswith("subfig_clip") else name)
    known = REWARD_PARAMETERS | {"OpenCLIP": REWARD_PARAMETERS["subfig_clipT"]}
    return sum(4 * known[name] for name in found)


def _base_layers(policy: Policy) -> list[tuple[str, torch.nn.Linear]]:
    """Layers that quantization would replace, found behind the adapters that wrap them."""
    return [(n.replace(".base_layer", ""), layer) for n, layer in quantize.quantizable(policy.transformer)
            if ".lora_" not in n]  # fmt: skip


def decoded_bytes(policy: Policy, options: RunOptions, tokens: int) -> int:
    """Largest addition of one quantized layer while it computes: its decoded weight, or int8's 32-bit products."""
    kind = options.pretrained.quantize
    if not kind:
        return 0
    element = 2 if policy.dtype == torch.bfloat16 else 4
    layers = [layer for _, layer in _base_layers(policy)]
    largest = max(element * layer.weight.numel() for layer in layers)
    if kind == "nf4":
        return largest
    return max(largest, max(4 * tokens * layer.out_features for layer in layers))


# --- phases -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """Images of one forward.

    Attributes:
        batch: Images.
        height: Pixels.
        width: Pixels.
        text: Text tokens (FLUX: padded to ``max_sequence_length``; Qwen-Image-Edit: image and instruction).
    """

    batch: int
    height: int
    width: int
    text: int


def shape(policy: Policy, options: RunOptions, resolution: int, batch: int) -> Shape:
    """A square image at ``resolution``; images of ``item_size='aspect'`` have the same area."""
    height, width = round_to_multiple((resolution, resolution), policy.size_multiple)
    text = options.max_sequence_length
    if type(policy).__name__.startswith("Qwen"):
        text = (height // 28) * (width // 28) + 64  # the reference image as the text encoder sees it, and words
    return Shape(batch, height, width, text)


def tokens(policy: Policy, size: Shape) -> int:
    """Tokens of a batch in the transformer: text, image and, for an editor, the reference."""
    rows, columns = policy._grid(size.height, size.width)
    return size.batch * (size.text + rows * columns * (2 if policy.edits_images else 1))


def parameters(policy: Policy) -> dict[str, int]:
    """Parameters by part; the transformer's without its adapters."""
    parts = {n: m for n, m in policy.pipeline.components.items() if isinstance(m, torch.nn.Module)}
    counts = {name: sum(p.numel() for p in module.parameters()) for name, module in parts.items()}
    adapters = {n: p.numel() for n, p in policy.transformer.named_parameters() if ".lora_" in n}
    counts["transformer"] -= sum(adapters.values())
    return counts | {"adapter": sum(count for name, count in adapters.items() if ".old." not in name)}


def conditioning(policy: Policy, size: Shape) -> Conditioning:
    """Empty conditioning in the shapes of ``encode``; the reference of an editor has the size of the sampled image."""
    of = type(policy).__name__
    config = policy._transformer_config
    rows, columns = policy._grid(size.height, size.width)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(size.batch, *shape, device=policy.device, dtype=policy.dtype)

    fields: dict[str, Any] = {"prompt_embeds": empty(size.text, config.joint_attention_dim)}
    if policy.edits_images:
        fields["reference"] = empty(rows * columns, config.in_channels)
        fields["reference_grid"] = torch.tensor([[rows, columns]] * size.batch)
    if of.startswith("Qwen"):
        from paco_grpo.policies.qwen_image_edit import QwenEditConditioning

        if policy.guided:
            fields["negative_embeds"] = empty(size.text, config.joint_attention_dim)
            fields["negative_mask"] = None
        return QwenEditConditioning(prompt_mask=None, **fields)
    from paco_grpo.policies.flux import FluxConditioning
    from paco_grpo.policies.flux_kontext import KontextConditioning

    fields["pooled_prompt_embeds"] = empty(config.pooled_projection_dim)
    return (KontextConditioning if policy.edits_images else FluxConditioning)(**fields)


def peak_of(action: Callable[[], Any], block: int | None = None) -> int:
    """Peak bytes of the tensors that ``action`` creates."""
    with LiveBytes(**({} if block is None else {"block": block})) as live:
        action()
    return live.peak


def sampling(policy: Policy, size: Shape) -> int:
    """One forward without gradient, with its inputs."""

    def run() -> None:
        latents = policy.initial_latents(range(size.batch), size.height, size.width)
        sigma = torch.full((size.batch,), 0.5, device=policy.device)
        policy.velocity(latents, sigma, conditioning(policy, size), size.height, size.width)

    with torch.no_grad():
        return peak_of(run)


def decoding(policy: Policy, size: Shape) -> int:
    """Latents to pixels through the VAE."""

    def run() -> None:
        latents = policy.initial_latents(range(size.batch), size.height, size.width)
        unpacked = policy.pipeline._unpack_latents(latents, size.height, size.width, policy.pipeline.vae_scale_factor)
        policy._pixels(unpacked)

    with torch.no_grad(), _attention(policy):
        return peak_of(run)


def _attention(policy: Policy) -> AbstractContextManager:
    """Fused attention for the meta device, which has none."""
    return MetaAutocast() if policy.device.type == "meta" else nullcontext()


def encoding(policy: Policy, size: Shape) -> int | None:
    """One prompt through FLUX's text encoders; None for Qwen, whose encoder reads image values."""
    if type(policy).__name__.startswith("Qwen"):
        return None
    clip, t5 = policy.text_encoders()

    def run() -> None:
        t5(torch.zeros(1, size.text, dtype=torch.long, device=policy.device))
        clip(torch.zeros(1, clip.config.max_position_embeddings, dtype=torch.long, device=policy.device))

    with torch.no_grad(), _attention(policy):
        return peak_of(run)


def rollout(policy: Policy, options: RunOptions, size: Shape) -> Rollout:
    """A rollout of these images with one noise step, ready for the objective."""
    x = policy.initial_latents(range(size.batch), size.height, size.width)
    ids = torch.zeros(size.batch, dtype=torch.long)
    return Rollout(
        item_ids=ids, seeds=ids, clean_latents=x.clone(), conditioning=conditioning(policy, size),
        noise_steps=[NoiseStep(1, x, x.clone(), x.clone(), torch.zeros(size.batch, device=policy.device))],
        sigmas=policy.sigmas(options.sample.num_steps, size.height, size.width), height=size.height, width=size.width,
        noise_level=options.sample.noise_level, cps=options.sample.cps,
    )  # fmt: skip


def record_bytes(policy: Policy, options: RunOptions, size: Shape, images: int, prompts: int) -> int:
    """Bytes of the rollout records of ``images`` and the conditioning of ``prompts``, kept until the update."""
    one = dataclasses.replace(size, batch=1)
    held = rollout(policy, options, one)
    (step,) = held.noise_steps
    latents = sum(t.nbytes for t in (step.latents, step.next_latents, step.mean)) * len(options.sample.noise_steps)
    texts = sum(v.nbytes for v in held.conditioning._values().values() if isinstance(v, torch.Tensor))
    return images * (latents + held.clean_latents.nbytes) + prompts * texts


def training(policy: Policy, options: RunOptions, size: Shape, block: int | None = None) -> dict[str, int]:
    """Forward and backward of one micro-batch at one noise step.

    Returns:
        Bytes: ``saved`` for the backward pass, ``peak`` at once (with gradients of the trained weights), and
        ``gradients`` alone.
    """
    sampled = rollout(policy, options, size)
    step = Step(sampled, 1, torch.zeros(size.batch, device=policy.device))
    for parameter in trainable_parameters(policy):
        parameter.grad = None
    with LiveBytes(**({} if block is None else {"block": block})) as live:
        with SavedBytes(policy.transformer) as saved:
            loss = get_objective(options.train.loss_type)(step, policy, options.train).loss.sum()
        loss.backward()
        del loss
        peak = live.peak
    gradients = sum(p.grad.nbytes for p in trainable_parameters(policy) if p.grad is not None)
    return {"saved": saved.total, "peak": peak, "gradients": gradients}


def tail_bytes(policy: Policy, options: RunOptions) -> int:
    """Bytes of the quantized copies for ``sample.tail_weights``."""
    kind = options.sample.tail_weights
    layers = quantize.token_layers(unwrap(policy.transformer)).values() if kind else ()
    return sum(quantize.stored_bytes(layer, kind) for layer in layers)


def merged_bytes(policy: Policy) -> int:
    """Bytes of the base weights that ``sample.merge_lora`` sets aside."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m.get_base_layer() for m in policy.transformer.modules() if isinstance(m, BaseTunerLayer)]
    return sum(layer.weight.nbytes for layer in layers)
