"""The toy FLUX Kontext: the toy FLUX, trained to read instructions and a reference image, as a FluxKontextPipeline.

It starts from the text-to-image base, which can draw already. The text encoders are new and small: an instruction has four
words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from paco_toy.world import SHAPES
from toy_models.edit_data import DEPARTURE, INSTRUCTIONS, VALUES, EditBatch, asked_tokens, panel_tokens, sample_edits
from toy_models.flux import new_text_encoders, token_ids, trained_modules, velocity, word_tokenizer
from toy_models.panels import LatentCache, PanelCache
from toy_models.probes import PanelProbes
from toy_models.training import fit, flow_errors
from toy_models.vae import flux_latents

IMAGE_SIDES = (64, 128)  # pixels of the scenes that it edits well
TEXT_TOKENS = 8  # an instruction has four words and an end
GUIDANCE = 2.5  # always; the configuration kontext_editing samples with it too
ASKED_WEIGHT = 3.0  # of the panel that the instruction names, in the loss; the others are mostly copied
WEIGHTS = {"drawing": 1.0, "shape": 0.3, "asked": 0.5}
_BATCH = {16: 48, 32: 16, 64: 4}
# From which share of the time on: panel sides of successive steps. The named panel is learned on small images.
_ORDERS = ((0.0, (16, 16, 16, 32)), (0.25, (32, 16, 32, 32, 64)), (0.6, (64, 32, 64, 64, 32)))
_LATER_ORDERS = ((0.0, (32, 32, 32, 32, 32, 32, 32, 64)),)
_OBEDIENT_SHARE = 0.75  # targets follow the instruction until then; departing ones first would delay learning


def new(models: Path, seed: int) -> FluxKontextPipeline:
    """A pipeline around the text-to-image base in ``models``/flux, with text encoders that read instructions."""
    base = FluxPipeline.from_pretrained(models / "flux", torch_dtype=torch.float32)
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(["make", "the", *SHAPES, *VALUES], TEXT_TOKENS)
    clip, t5 = new_text_encoders(tokenizer)
    _pretrain_text(tokenizer, clip, t5)
    return FluxKontextPipeline(
        scheduler=base.scheduler, vae=base.vae, text_encoder=clip, tokenizer=tokenizer, text_encoder_2=t5,
        tokenizer_2=tokenizer, transformer=base.transformer,
    )  # fmt: skip


def load(folder: Path) -> FluxKontextPipeline:
    """The pipeline in a folder, in float32."""
    return FluxKontextPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def _pretrain_text(tokenizer: PreTrainedTokenizerFast, clip: nn.Module, t5: nn.Module) -> None:
    """Teaches the text encoders to read instructions: every T5 token and CLIP's pooled vector encode shape and value."""
    ids = token_ids(tokenizer, INSTRUCTIONS)
    wanted = [torch.arange(len(ids)) // len(VALUES), torch.arange(len(ids)) % len(VALUES)]
    probes = nn.ModuleList([nn.Linear(64, count) for _ in range(2) for count in (len(SHAPES), len(VALUES))])

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        states = [t5(ids).last_hidden_state[:, :5], clip(ids).pooler_output[:, None]]
        logits = [probe(states[i // 2]) for i, probe in enumerate(probes)]
        losses = [cross_entropy(x.flatten(0, 1), wanted[i % 2].repeat_interleave(x.shape[1])) for i, x in enumerate(logits)]
        return sum(losses), {"loss": sum(losses)}

    fit([(nn.ModuleList([clip, t5, probes]), 2e-3)], next_loss, "text", steps=300, floor=0.0, clip=math.inf)


def edit_losses(
    pipe: FluxKontextPipeline, probes: PanelProbes, latents: LatentCache, batch: EditBatch, side: int,
    reference_noise: float = 0.05,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """``drawing``: mean w (v − (ε − x_0))², w larger in the panel that the instruction names; and the probes' losses.

    The reference's latents get a little noise, since those of a real image differ from the cached ones: the image was
    resized, and the VAE's group norms saw other neighbors.
    """
    x0, reference = (latents.grids(side, kind, batch.views, batch.variants) for kind in (batch.after, batch.before))
    b, c, h, w = x0.shape
    tokens, seen = (FluxPipeline._pack_latents(x, b, c, h, w) for x in (x0, reference))
    seen = seen + reference_noise * torch.randn_like(seen)
    ids = FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, x0.device, x0.dtype)
    ids = torch.cat([ids, ids + torch.tensor([1, 0, 0])])  # the pipeline marks reference tokens with 1
    text = token_ids(pipe.tokenizer, batch.instructions)

    def predict(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return velocity(pipe, torch.cat([noisy, seen], dim=1), t, text, ids, GUIDANCE)[:, : tokens.shape[1]]

    errors = flow_errors(predict, tokens, pipe.scheduler.config)
    asked = asked_tokens(batch.place, h // 4)
    weight = (1 + (ASKED_WEIGHT - 1) * asked) / (1 + (ASKED_WEIGHT - 1) / 4)  # mean 1
    shape = panel_tokens(batch.before % len(SHAPES), h // 4)
    drawing = (errors.mean(dim=2) * weight).mean()
    return {"drawing": drawing, **probes.losses(asked.repeat(1, 2), shape.repeat(1, 2))}


def train(
    pipe: FluxKontextPipeline, seconds: float, seed: int, longer: bool = False, snapshot: Callable[[], None] | None = None
) -> None:
    """Trains transformer and text encoders for a wall-clock time; the pipeline ends with averaged weights.

    Args:
        longer: The pipeline was trained before: larger images, and a new learning rate schedule.
        snapshot: Called every five minutes while the pipeline holds the averaged weights.
    """
    lr, orders, seed = (1e-3, _LATER_ORDERS, seed + 1) if longer else (1.2e-3, _ORDERS, seed)
    panels = {side: PanelCache(side, 2, seed) for side in sorted({side for _, order in orders for side in order})}
    latents = LatentCache(flux_latents(pipe.vae), panels, seed)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])
    probes = PanelProbes(pipe.transformer, shapes=True)

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        order = [order for since, order in orders if progress >= since][-1]
        side = order[step % len(order)]
        batch = sample_edits(_BATCH[side], rng, 0.0 if progress < _OBEDIENT_SHARE else DEPARTURE)
        losses = edit_losses(pipe, probes, latents, batch, side)
        return sum(WEIGHTS[name] * losses[name] for name in WEIGHTS), {f"{name} {2 * side}px": v for name, v in losses.items()}

    learning = [*trained_modules(pipe, lr), (probes, 1e-3)]
    fit(learning, next_loss, "flux_kontext", seconds=seconds, warm_up=100, average=True, snapshot=snapshot)
    probes.remove()


def draw(
    pipe: FluxKontextPipeline, references: Sequence[Image.Image], instructions: Sequence[str], seeds: Sequence[int],
    steps: int = 10,
) -> list[Image.Image]:  # fmt: skip
    """Edited images by diffusers' own pipeline, at the size of the references (all of one size, square)."""
    side = references[0].width
    return pipe(
        image=list(references), prompt=list(instructions), height=side, width=side, max_area=side * side,
        num_inference_steps=steps, guidance_scale=GUIDANCE, max_sequence_length=TEXT_TOKENS, _auto_resize=False,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images  # fmt: skip
