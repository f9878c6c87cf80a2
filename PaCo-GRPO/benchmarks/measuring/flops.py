"""FLOPs counted by PyTorch on the meta device: exact for any size, on any machine, nothing is computed.

A multiply-add counts as two; only matrix products, convolutions and attention count, as everywhere. What is counted is
the mathematics (model FLOPs): forwards of the transformer without its LoRA, which a rollout may merge; and for training
the forward and backward with it, without what gradient checkpointing would compute again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from measuring.architectures import Architecture
from measuring.generators import POLICY_CLASSES, pipeline_of
from paco_grpo.policies.adapters import add_lora
from paco_grpo.policies.base import Policy
from paco_grpo.policies.flux import FluxConditioning
from paco_grpo.policies.flux_kontext import KontextConditioning
from paco_grpo.policies.qwen_image_edit import QwenEditConditioning
from paco_grpo.types import Conditioning

_META = torch.device("meta")


@dataclass(frozen=True)
class Shape:
    """What the transformer sees of one image.

    Attributes:
        height: Pixels.
        width: Pixels.
        text: Text tokens.
        reference: Pixels (height, width) of the reference image (editors), else None.
    """

    height: int
    width: int
    text: int
    reference: tuple[int, int] | None = None

    def image_tokens(self, multiple: int) -> tuple[int, int]:
        """Tokens that are drawn, and those of the reference; ``multiple`` pixels a token side."""
        drawn = (self.height // multiple) * (self.width // multiple)
        reference = self.reference or (0, 0)
        return drawn, (reference[0] // multiple) * (reference[1] // multiple)


@dataclass(frozen=True)
class ImageFlops:
    """Of one image of one shape, through the transformer once.

    Attributes:
        forward: The bare transformer.
        training_forward: With its LoRA, unmerged.
        training_backward: Gradients of activations and of the LoRA.
    """

    forward: int
    training_forward: int
    training_backward: int

    @property
    def training(self) -> int:
        """One forward and backward."""
        return self.training_forward + self.training_backward


@cache
def _counted(text: str, shape: Shape, lora_rank: int) -> ImageFlops:
    architecture = _from_text[text]
    blocks = architecture.transformer
    double, single = blocks["num_layers"], blocks.get("num_single_layers", 0)
    one, two = _directly(text, shape, lora_rank, 1, 1), _directly(text, shape, lora_rank, 2, 1)
    more = _directly(text, shape, lora_rank, 1, 2) if single else one
    # Blocks of a kind are all alike, so this is exact, and a 12 B model is counted in seconds.
    return ImageFlops(
        *(a + (double - 1) * (b - a) + (single - 1) * (c - a) for a, b, c in zip(one, two, more, strict=True))
    )


_from_text: dict[str, Architecture] = {}


def image_flops(architecture: Architecture, shape: Shape, lora_rank: int = 64) -> ImageFlops:
    """Counted on transformers of one and two blocks of each kind; see ``directly``."""
    _from_text[repr(architecture)] = architecture
    return _counted(repr(architecture), shape, lora_rank)


def directly(architecture: Architecture, shape: Shape, lora_rank: int = 64) -> ImageFlops:
    """``image_flops`` counted on the whole transformer: slower, the same numbers."""
    _from_text[repr(architecture)] = architecture
    blocks = architecture.transformer
    counts = _directly(repr(architecture), shape, lora_rank, blocks["num_layers"], blocks.get("num_single_layers", 0))
    return ImageFlops(*counts)


def _directly(text: str, shape: Shape, lora_rank: int, double: int, single: int) -> tuple[int, int, int]:
    policy = meta_policy(_from_text[text].with_blocks(double, single))
    with torch.no_grad():
        forward = count(lambda: _velocity(policy, shape))
    add_lora(policy, rank=lora_rank, alpha=lora_rank)
    with FlopCounterMode(display=False) as counter:
        velocity = _velocity(policy, shape)
        training_forward = counter.get_total_flops()
        velocity.sum().backward()
    return forward, training_forward, counter.get_total_flops() - training_forward


def count(function: Callable[[], object]) -> int:
    """FLOPs of calling ``function``."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def meta_policy(architecture: Architecture) -> Policy:
    """A policy of shapes alone (float32, which has no influence on the count)."""
    return POLICY_CLASSES[architecture.family](pipeline_of(architecture, torch.float32, _META), device=_META)


def _velocity(policy: Policy, shape: Shape) -> torch.Tensor:
    drawn, _ = shape.image_tokens(policy.size_multiple)
    latents = torch.empty(1, drawn, policy.transformer.config.in_channels, device=_META)
    sigma = torch.empty(1, device=_META)
    return policy.conditional_velocity(latents, sigma, conditioning_for(policy, shape), shape.height, shape.width)


def conditioning_for(policy: Policy, shape: Shape) -> Conditioning:
    """One row of empty features in the shapes that the policy's transformer takes."""
    config = policy.transformer.config
    text = torch.empty(1, shape.text, config.joint_attention_dim, device=policy.device)
    if not policy.edits_images:
        return FluxConditioning(text, torch.empty(1, config.pooled_projection_dim, device=policy.device))
    height, width = shape.reference
    grid = torch.tensor([[height // policy.size_multiple, width // policy.size_multiple]])
    reference = torch.empty(1, int(grid.prod()), config.in_channels, device=policy.device)
    held = {"reference": reference, "reference_grid": grid}
    if policy.has_true_cfg:
        return QwenEditConditioning(prompt_embeds=text, prompt_mask=None, **held)
    pooled = torch.empty(1, config.pooled_projection_dim, device=policy.device)
    return KontextConditioning(prompt_embeds=text, pooled_prompt_embeds=pooled, **held)


# --- the rest of a generator ------------------------------------------------------------------------------------------


@cache
def _parts(text: str, height: int, width: int, tokens: int) -> dict[str, int | None]:
    architecture = _from_text[text]
    policy = meta_policy(architecture.with_blocks(1, 1))
    pipeline, config = policy.pipeline, policy.transformer.config
    drawn = height * width // policy.size_multiple**2
    latents = torch.empty(1, drawn, config.in_channels, device=_META)

    def decode() -> None:
        unpacked = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
        policy._pixels(unpacked)

    def encode() -> None:
        clip = torch.zeros(1, architecture.clip["max_position_embeddings"], dtype=torch.long, device=_META)
        pipeline.text_encoder(clip)
        pipeline.text_encoder_2(torch.zeros(1, tokens, dtype=torch.long, device=_META))

    with torch.no_grad():
        # Qwen2.5-VL reads values of its inputs while it computes, which shapes alone do not have.
        return {"decode": count(decode), "encode": count(encode) if architecture.clip else None}


def part_flops(architecture: Architecture, shape: Shape) -> dict[str, int | None]:
    """FLOPs of decoding one image and of encoding one text with both encoders; None = cannot be counted."""
    _from_text[repr(architecture)] = architecture
    return _parts(repr(architecture), shape.height, shape.width, shape.text)
