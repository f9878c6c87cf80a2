"""The three generators with tiny random weights behind one face, for tests that every policy must pass.

python tests/tiny_policies.py NAME FOLDER    writes the pipeline folder of flux, flux_kontext or qwen_image_edit
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from PIL import Image
from tiny_flux import build_tiny_flux
from tiny_qwen_edit import build_tiny_qwen_edit

from paco_grpo.policies import Policy, load_policy
from paco_grpo.policies.lora import trainable_parameters
from paco_grpo.sampling.denoise import rollout
from paco_grpo.types import Item

EDITORS = ("flux_kontext", "qwen_image_edit")
NAMES = ("flux", *EDITORS)
OPTIONS = {"qwen_image_edit": {"guidance_scale": 4.0, "negative_prompt": " "}}


def build(name: str, folder: Path) -> Path:
    """Write the pipeline folder of the policy called ``name``."""
    if name == "flux":
        return build_tiny_flux(folder)
    if name == "flux_kontext":
        return build_tiny_flux(folder, pipeline_class=FluxKontextPipeline)
    return build_tiny_qwen_edit(folder)


def load(name: str, folder: Path, **options) -> Policy:
    """The policy, with the guidance it is meant to be used with."""
    return load_policy(folder, **({"max_sequence_length": 24} | OPTIONS.get(name, {}) | options))


def picture(seed: int = 0, height: int = 32, width: int = 32) -> Image.Image:
    """A smooth random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def items(name: str, *prompts: str, size: tuple[int, int] = (32, 32), reference: tuple[int, int] | None = None):
    """An item for each prompt, sampled at ``size``; for an editor with a picture of size ``reference``."""
    return [
        Item(i, prompt, *size, image=picture(i, *(reference or size)) if name in EDITORS else None)
        for i, prompt in enumerate(prompts)
    ]


def disturb(policy: Policy, seed: int = 0, scale: float = 0.2) -> None:
    """Move the trainable weights, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(policy):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def draw(
    policy: Policy, of: list[Item], seeds: list[int], height: int, width: int, num_steps: int
) -> list[Image.Image]:
    """Images of the items, each from its seed, by deterministic sampling."""
    sized = [Item(item.item_id, item.prompt, height, width, image=item.image) for item in of]
    ids = [item.item_id for item in of]
    latents = rollout(policy, policy.encode(sized), ids, seeds, height, width, num_steps=num_steps).clean_latents
    with torch.no_grad():
        return policy.decode(latents, height, width)


if __name__ == "__main__":
    print(build(sys.argv[1], Path(sys.argv[2])))
