"""Every generator with tiny random weights."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tiny_pipelines
import torch
from diffusers import (
    DiffusionPipeline,
    FluxKontextPipeline,
    LongCatImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from PIL import Image
from tiny_pipelines import (
    build_tiny_flux,
    build_tiny_flux2,
    build_tiny_krea2,
    build_tiny_longcat,
    build_tiny_qwen,
    build_tiny_qwen_21,
    build_tiny_sd3,
    build_tiny_z_image,
)

from paco_grpo.policies import Policy, PolicySettings, load_policy
from paco_grpo.policies.adapters import add_lora
from paco_grpo.policies.diffusers_policy import DiffusersPolicy
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.types import Item, Rollout


@dataclass(frozen=True)
class Family:
    """What tests need to know of a generator."""

    build: Callable[[], DiffusionPipeline]
    options: dict[str, Any] = field(
        default_factory=dict
    )  # of ``load_policy``: the guidance it is meant to be used with
    references: int = 0  # images of an item
    discarded: str = ""  # regular expression for the LoRA layers whose output nothing reads
    policy_name: str | None = None  # as ``config.pretrained.policy``
    rounding: float = 0.05  # at most: the relative error of a velocity in bfloat16


_FLUX2 = Family(partial(build_tiny_flux2, klein=False), references=2)
_KLEIN = Family(build_tiny_flux2, {"guidance_scale": 4.0}, references=2)
_TRUE_CFG = {"guidance_scale": 4.0, "negative_prompt": " "}
# The last block computes text that nothing reads.
_QWEN_UNUSED = r"transformer_blocks\.1\.(attn\.(add_q_proj|to_add_out)|txt_mlp\..*)"
_PLUS = Family(
    partial(build_tiny_qwen, pipeline_class=QwenImageEditPlusPipeline),
    _TRUE_CFG,
    references=2,
    discarded=_QWEN_UNUSED,
)

_QWEN_21 = Family(build_tiny_qwen_21, _TRUE_CFG, references=2)

FAMILIES = {
    "flux": Family(build_tiny_flux),
    "flux_kontext": Family(
        partial(build_tiny_flux, pipeline_class=FluxKontextPipeline), references=1
    ),
    "flux2": _FLUX2,
    "flux2_klein": _KLEIN,
    "krea2": Family(build_tiny_krea2, {"guidance_scale": 3.5, "negative_prompt": ""}),
    "longcat_image": Family(build_tiny_longcat, {"guidance_scale": 4.5, "negative_prompt": ""}),
    "longcat_image_edit": Family(
        partial(build_tiny_longcat, LongCatImageEditPipeline),
        {"guidance_scale": 4.5, "negative_prompt": ""},
        references=1,
    ),
    "qwen_image_edit": Family(build_tiny_qwen, _TRUE_CFG, references=1, discarded=_QWEN_UNUSED),
    "qwen_image": Family(
        partial(build_tiny_qwen, pipeline_class=QwenImagePipeline),
        _TRUE_CFG,
        discarded=_QWEN_UNUSED,
    ),
    "qwen_image_21": _QWEN_21,
    "stable_diffusion_3": Family(
        build_tiny_sd3,
        {"guidance_scale": 4.5, "negative_prompt": ""},
        discarded=r"transformer_blocks\.1\.attn\.add_q_proj",  # the last block computes no text
    ),
    "z_image": Family(
        build_tiny_z_image,
        {"guidance_scale": 3.0, "negative_prompt": "", "max_sequence_length": 64},
    ),
    "qwen_image_edit_plus": replace(
        _PLUS, build=partial(_PLUS.build, zero_cond_t=True)
    ),  # as in 2511
}
# Other weights of a family, which must give the stock pipeline's image, too.
VARIANTS = {
    "flux without guidance": replace(
        FAMILIES["flux"], build=partial(build_tiny_flux, guidance_embeds=False)
    ),
    "stable_diffusion_3 large": replace(
        FAMILIES["stable_diffusion_3"], build=partial(build_tiny_sd3, dual=False)
    ),
    "flux2 without references": replace(_FLUX2, references=0),
    "flux2_klein without references": replace(_KLEIN, references=0),
    "qwen_image_21 turbo without references": Family(
        partial(build_tiny_qwen_21, sample_sigmas=[1.0, 0.7, 0.2])
    ),
    "qwen_image_edit_plus without zero_cond_t": _PLUS,  # as in 2509
    "krea2 turbo": Family(partial(build_tiny_krea2, is_distilled=True), {"guidance_scale": 0.0}),
    "qwen_image_edit without guidance": replace(FAMILIES["qwen_image_edit"], options={}),
}
EDITORS = ("flux_kontext", "qwen_image_edit")
NAMES = ("flux", *EDITORS)  # on which every test of policies runs


# Those with another tokenizer than Qwen's.
OTHER_TOKENIZERS = ("flux", "flux_kontext", "flux2", "stable_diffusion_3")


def build(name: str, folder: Path) -> Path:
    (FAMILIES | VARIANTS)[name].build().save_pretrained(folder)
    return folder


def build_with_qwen_tokenizer(name: str, folder: Path, tokenizer: Path) -> Path:
    """With all 151,669 tokens; skips the test of a family that does not have them."""
    if name in OTHER_TOKENIZERS or name in VARIANTS:
        pytest.skip("another tokenizer than Qwen's, or only other weights")
    with mock.patch.object(tiny_pipelines, "QWEN_TOKENIZER", tokenizer):
        return build(name, folder)


def load(name: str, folder: Path, policy_name: str | None = None, **options) -> DiffusersPolicy:
    family = (FAMILIES | VARIANTS)[name]
    options = {"max_sequence_length": 24} | family.options | options
    return load_policy(folder, PolicySettings(**options), policy_name or family.policy_name)


def picture(seed: int = 0, height: int = 32, width: int = 32) -> Image.Image:
    """A smooth random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def items(
    name: str,
    *prompts: str,
    size: tuple[int, int] = (32, 32),
    reference: tuple[int, int] | None = None,
):
    """An item for each prompt; for an editor with pictures, the first of size ``reference``."""
    made = []
    count = (FAMILIES | VARIANTS)[name].references
    for i, prompt in enumerate(prompts):
        references = tuple(picture(i + 100 * k, *(reference or size)) for k in range(count))
        made.append(Item(i, prompt, *size, references=references))
    return made


def trainable_parameters(policy: Policy) -> list[torch.nn.Parameter]:
    return [parameter for parameter in policy.transformer.parameters() if parameter.requires_grad]


def disturb(policy: Policy, seed: int = 0, scale: float = 0.2) -> None:
    """Move the trainable weights, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(policy):
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def trained(name: str, folder: Path, rank: int = 3, alpha: float = 6, **options) -> Policy:
    """The policy with a LoRA that changes its velocity."""
    policy = load(name, folder, **options)
    torch.manual_seed(0)  # PEFT draws A: not from where the tests before have left the generator
    add_lora(policy, rank, alpha)
    disturb(policy)
    return policy


def velocity_of(policy: Policy, name: str, *prompts: str, size: int = 32) -> torch.Tensor:
    """At σ = 0.6, from fixed noise."""
    count = len(prompts)
    conditioning = policy.encode(items(name, *prompts, size=(size, size)))
    latents = policy.initial_latents(range(count), size, size)
    return policy.velocity(latents, torch.full((count,), 0.6), conditioning, size, size)


def sampled(policy: Policy, name: str, *prompts: str, num_steps: int = 3, **options) -> Rollout:
    """A rollout of an image of each prompt; ``options`` of ``Sampling``."""
    count = len(prompts)
    draws = Draws(range(count), range(4, 4 + count), 32, 32)
    conditioning = policy.encode(items(name, *prompts))
    return rollout(policy, conditioning, draws, Sampling(num_steps, **options))


def draw(
    policy: Policy, of: list[Item], seeds: list[int], height: int, width: int, num_steps: int
) -> list[Image.Image]:
    """Deterministically sampled images."""
    sized = [replace(item, height=height, width=width) for item in of]
    ids = [item.item_id for item in of]
    draws = Draws(ids, seeds, height, width)
    latents = rollout(policy, policy.encode(sized), draws, Sampling(num_steps)).clean_latents
    with torch.no_grad():
        return policy.decode(latents, height, width)
