"""FLOPs of a real generator by image size and text length, counted by PyTorch on the meta device: nothing is computed.

    python benchmarks/flops.py --preset flux-dev kontext-dev --resolutions 128 256 384 512 768 --text 512 128

A multiply-add counts as two; only matrix products, convolutions and attention count. These are model FLOPs: sampling is
the transformer without its LoRA, training is one forward and backward with it, and what gradient checkpointing computes
again does not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from measuring import report
from paco_grpo.policies import Policy
from paco_grpo.policies.lora import add_lora
from paco_grpo.rehearsal.architectures import PRESETS, Architecture
from paco_grpo.rehearsal.models import pipeline_of, policy_of
from paco_grpo.types import Conditioning

META = torch.device("meta")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ImageFlops:
    """FLOPs of one image passing through the transformer once.

    Attributes:
        forward: Without LoRA.
        training_forward: With LoRA, not merged.
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
def image_flops(architecture: Architecture, shape: Shape, lora_rank: int = 64) -> ImageFlops:
    """FLOPs of one image of ``shape``; an editor also sees a reference image of the same size.

    Blocks of one kind are alike, so counting one and two of each is exact, and a 12 B model is counted in seconds.
    """
    double = architecture.transformer["num_layers"]
    single = architecture.transformer.get("num_single_layers", 0)

    def counted(double: int, single: int) -> tuple[int, int, int]:
        return direct_flops(architecture.with_blocks(double, single), shape, lora_rank)

    one, two = counted(1, 1), counted(2, 1)
    more = counted(1, 2) if single else one
    return ImageFlops(
        *(a + (double - 1) * (b - a) + (single - 1) * (c - a) for a, b, c in zip(one, two, more, strict=True))
    )


def direct_flops(architecture: Architecture, shape: Shape, lora_rank: int = 64) -> tuple[int, int, int]:
    """``image_flops`` (its three fields) counted on all blocks."""
    policy = _meta_policy(architecture)
    with torch.no_grad():
        forward = _count(lambda: _velocity(policy, shape))
    add_lora(policy, rank=lora_rank, alpha=lora_rank)
    with FlopCounterMode(display=False) as counter:
        velocity = _velocity(policy, shape)
        training_forward = counter.get_total_flops()
        velocity.sum().backward()
    return forward, training_forward, counter.get_total_flops() - training_forward


@cache
def part_flops(architecture: Architecture, shape: Shape) -> dict[str, int | None]:
    """FLOPs to ``decode`` one image and to ``encode`` one text; None where they cannot be counted.

    Qwen2.5-VL reads values of its inputs while it computes, and tensors on the meta device have none.
    """
    policy = _meta_policy(architecture.with_blocks(1, 1))
    pipeline, height, width = policy.pipeline, shape.height, shape.width
    tokens = (height // policy.size_multiple) * (width // policy.size_multiple)
    latents = torch.empty(1, tokens, policy.transformer.config.in_channels, device=META)

    def decode() -> None:
        policy._pixels(pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor))

    def encode() -> None:
        clip = torch.zeros(1, architecture.tokenizers["tokenizer"].length, dtype=torch.long, device=META)
        pipeline.text_encoder(clip)
        pipeline.text_encoder_2(torch.zeros(1, shape.text, dtype=torch.long, device=META))

    with torch.no_grad():
        return {"decode": _count(decode), "encode": _count(encode) if "text_encoder_2" in architecture.modules else None}


def _count(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def _meta_policy(architecture: Architecture) -> Policy:
    return policy_of(pipeline_of(architecture, torch.float32, META), device=META)


def _velocity(policy: Policy, shape: Shape) -> torch.Tensor:
    tokens = (shape.height // policy.size_multiple) * (shape.width // policy.size_multiple)
    latents = torch.empty(1, tokens, policy.transformer.config.in_channels, device=META)
    sigma = torch.empty(1, device=META)
    return policy.velocity(latents, sigma, conditioning(policy, shape), shape.height, shape.width, guided=False)


def conditioning(policy: Policy, size: Shape) -> Conditioning:
    """Empty conditioning in the shapes of ``encode``; the reference of an editor has the size of the sampled image."""
    config = policy._transformer_config
    rows, columns = policy._grid(size.height, size.width)

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(size.batch, *shape, device=policy.device, dtype=policy.dtype)

    fields: dict[str, Any] = {"prompt_embeds": empty(size.text, config.joint_attention_dim)}
    if policy.edits_images:
        fields["reference"] = empty(rows * columns, config.in_channels)
        fields["reference_grid"] = torch.tensor([[[rows, columns]]] * size.batch)
    if type(policy).__name__.startswith("Qwen"):
        from paco_grpo.policies.qwen_image_edit import QwenEditConditioning

        return QwenEditConditioning(prompt_mask=None, **fields)
    from paco_grpo.policies.flux import FluxConditioning
    from paco_grpo.policies.flux_kontext import KontextConditioning

    fields["pooled_prompt_embeds"] = empty(config.pooled_projection_dim)
    return (KontextConditioning if policy.edits_images else FluxConditioning)(**fields)


def main(given: Sequence[str] | None = None) -> int:
    """Print a table for each preset."""
    arguments = parser().parse_args(given)
    columns = ["pixels", "image tokens", "text tokens", "one forward", "10 steps", "training step", "decode"]
    for preset in arguments.preset:
        architecture, rows = PRESETS[preset], []
        for side in arguments.resolutions:
            for text in arguments.text:
                shape = Shape(1, side, side, text)
                flops, decode = image_flops(architecture, shape), part_flops(architecture, shape)["decode"]
                tokens = (side // 16) ** 2 * (1 + architecture.editing)
                counts = flops.forward, 10 * flops.forward, flops.training, decode
                rows.append([str(side), str(tokens), str(text), *map(report.flops, counts)])
        print(f"{preset}, FLOPs of one image\n\n{report.table(columns, rows)}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in PRESETS if name not in ("tiny", "narrow")]
    made.add_argument("--preset", nargs="+", choices=names, default=["flux-dev"], help="real models")
    made.add_argument("--resolutions", type=int, nargs="+", default=[128, 256, 384, 512, 768, 1024], help="pixels")
    made.add_argument("--text", type=int, nargs="+", default=[512], help="text tokens")
    return made


if __name__ == "__main__":
    sys.exit(main())
