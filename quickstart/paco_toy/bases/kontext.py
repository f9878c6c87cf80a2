"""The toy FLUX Kontext: the toy FLUX, taught to read instructions and a reference image, saved as a FluxKontextPipeline.

It starts from the weights of the text-to-image base, which already draws. The text encoders are new and small: an instruction
is four words.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from PIL import Image
from torch import nn
from transformers import PreTrainedTokenizerFast

from paco_toy.bases.edit_batches import DEPARTURE, VALUES, EditBatch, draw_edits
from paco_toy.bases.flow import shifted_times, train_average, with_weights
from paco_toy.bases.generator import LatentCache, flux_latents, new_text_encoders, trained_modules, word_tokenizer
from paco_toy.bases.panels import PanelCache
from paco_toy.bases.probes import PanelProbes, asked_tokens, panel_tokens
from paco_toy.world import SHAPES

logger = logging.getLogger(__name__)

NAME = "flux_kontext"
IMAGE_SIDES = (64, 128)  # pixels of the scenes that it edits well
TEXT_TOKENS = 8  # an instruction has four words and an end
GUIDANCE = 2.5  # always, as `kontext_editing` samples
ASKED_WEIGHT = 3.0  # of the panel that the instruction names, in the loss; the others are mostly copied
WEIGHTS = {"drawing": 1.0, "shape": 0.3, "asked": 0.5}
_BATCH = {16: 48, 32: 16, 64: 4}
# What panel side each step trains on, in turn, from which share of the time on: what is asked is learned on small images.
_ORDERS = ((0.0, (16, 16, 16, 32)), (0.25, (32, 16, 32, 32, 64)), (0.6, (64, 32, 64, 64, 32)))
_LATER_ORDERS = ((0.0, (32, 32, 32, 32, 32, 32, 32, 64)),)
# Targets do as they are told until then, and depart from it afterwards: the other way round, what is asked is learned late.
_OBEDIENT_SHARE = 0.75


def new(models: Path, seed: int) -> FluxKontextPipeline:
    """A pipeline around the text-to-image base in ``models``/flux, with text encoders that read instructions."""
    base = FluxPipeline.from_pretrained(models / "flux", torch_dtype=torch.float32)
    torch.manual_seed(seed)
    tokenizer = word_tokenizer(["make", "the", *SHAPES, *VALUES], TEXT_TOKENS)
    clip, t5 = new_text_encoders(tokenizer)
    pretrain_text(tokenizer, clip, t5)
    return FluxKontextPipeline(
        scheduler=base.scheduler, vae=base.vae, text_encoder=clip, tokenizer=tokenizer, text_encoder_2=t5,
        tokenizer_2=tokenizer, transformer=base.transformer,
    )  # fmt: skip


def load(folder: Path) -> FluxKontextPipeline:
    """The pipeline of a folder, in float32."""
    return FluxKontextPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def pretrain_text(tokenizer: PreTrainedTokenizerFast, clip: nn.Module, t5: nn.Module, steps: int = 300) -> None:
    """Teaches the text encoders to read instructions before anything is drawn, as FLUX's T5 and CLIP have been.

    Every token of T5's, and CLIP's pooled vector, come to know the shape and the value. Linear probes learn along and are
    thrown away.
    """
    pairs = [(s, v) for s in range(len(SHAPES)) for v in range(len(VALUES))]
    ids = _token_ids(tokenizer, [f"make the {SHAPES[s]} {VALUES[v]}" for s, v in pairs])
    wanted = torch.tensor(pairs).T
    probes = nn.ModuleList([nn.Linear(64, count) for _ in range(2) for count in (len(SHAPES), len(VALUES))])
    modules = nn.ModuleList([clip, t5, probes]).train()
    optimizer = torch.optim.AdamW(modules.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        tokens, pooled = t5(ids).last_hidden_state[:, :5], clip(ids).pooler_output
        logits = [probes[0](tokens), probes[1](tokens), probes[2](pooled)[:, None], probes[3](pooled)[:, None]]
        losses = [
            nn.functional.cross_entropy(x.flatten(0, 1), wanted[i % 2].repeat_interleave(x.shape[1]))
            for i, x in enumerate(logits)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        if step % 100 == 99:
            logger.info("text step %d %s", step + 1, " ".join(f"{loss.item():.3f}" for loss in losses))


def _token_ids(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    return tokenizer(
        list(texts), padding="max_length", max_length=TEXT_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def edit_losses(
    pipe: FluxKontextPipeline, probes: PanelProbes, latents: LatentCache, batch: EditBatch, side: int,
    reference_noise: float = 0.05,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """drawing: mean w (v − (ε − x_0))² over the drawn tokens, w larger in the panel asked for; and the probes' losses.

    The reference's latents are slightly noisy, since those of a real image differ from the cached ones: the image was
    resized, and the VAE's group norms saw other neighbours.
    """
    x0, reference = (latents.grids(side, kind, batch.views, batch.variants) for kind in (batch.after, batch.before))
    b, c, h, w = x0.shape
    tokens, seen = (FluxPipeline._pack_latents(x, b, c, h, w) for x in (x0, reference))
    seen = seen + reference_noise * torch.randn_like(seen)
    ids = FluxPipeline._prepare_latent_image_ids(b, h // 2, w // 2, x0.device, x0.dtype)
    reference_ids = ids.clone()
    reference_ids[:, 0] = 1  # the pipeline's mark of a reference token
    t = shifted_times(b, tokens.shape[1], pipe.scheduler.config)
    noise = torch.randn_like(tokens)
    noisy = (1 - t[:, None, None]) * tokens + t[:, None, None] * noise
    text = _token_ids(pipe.tokenizer, batch.instructions)
    velocity = pipe.transformer(
        hidden_states=torch.cat([noisy, seen], dim=1), timestep=t, guidance=torch.full((b,), GUIDANCE),
        pooled_projections=pipe.text_encoder(text).pooler_output,
        encoder_hidden_states=pipe.text_encoder_2(text).last_hidden_state,
        txt_ids=torch.zeros(text.shape[1], 3), img_ids=torch.cat([ids, reference_ids]), return_dict=False,
    )[0][:, : tokens.shape[1]]  # fmt: skip
    asked = asked_tokens(batch.place, h // 4)
    weight = (1 + (ASKED_WEIGHT - 1) * asked) / (1 + (ASKED_WEIGHT - 1) / 4)  # mean 1
    drawing = ((velocity - (noise - tokens)).square().mean(dim=2) * weight).mean()
    shape = panel_tokens(batch.before % len(SHAPES), h // 4)
    return {"drawing": drawing, **probes.losses(shape.repeat(1, 2), asked.repeat(1, 2))}


def train(
    pipe: FluxKontextPipeline,
    seconds: float,
    seed: int,
    lr: float = 1.2e-3,
    orders: Sequence[tuple[float, Sequence[int]]] = _ORDERS,
    snapshot: Callable[[FluxKontextPipeline], None] | None = None,
) -> None:
    """Trains transformer and text encoders for a fixed wall-clock time; the pipeline ends with the averaged weights.

    Args:
        orders: (share of the time, panel sides in turn from then on).
        snapshot: Handed a copy with the averaged weights every five minutes, for a look while training goes on.
    """
    used = sorted({side for _, order in orders for side in order})
    panels = {side: PanelCache(side, 2, seed) for side in used}
    latents = LatentCache(flux_latents(pipe.vae), panels, seed)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])

    probes = PanelProbes(pipe.transformer)

    def next_loss(step: int, progress: float) -> tuple[int, torch.Tensor]:
        order = [order for since, order in orders if progress >= since][-1]
        side = order[step % len(order)]
        batch = draw_edits(_BATCH[side], rng, 0.0 if progress < _OBEDIENT_SHARE else DEPARTURE)
        losses = edit_losses(pipe, probes, latents, batch, side)
        if step % 50 == 0:
            logger.info("step %d %dpx %s", step, 2 * side, " ".join(f"{n} {v.item():.3f}" for n, v in losses.items()))
        return 2 * side, sum(WEIGHTS[name] * value for name, value in losses.items())

    def look(averaged: nn.ModuleList) -> None:
        copied = copy.deepcopy(pipe)
        with_weights(trained_modules(copied), averaged[:-1])
        snapshot(copied)

    train_average(
        nn.ModuleList([*trained_modules(pipe), probes]), (lr, 0.3 * lr, 0.3 * lr, 1e-3), next_loss, seconds, label=NAME,
        look=look if snapshot else None, look_every=300.0,
    )  # fmt: skip
    probes.remove()


def train_longer(pipe: FluxKontextPipeline, seconds: float, seed: int, snapshot: Callable | None = None) -> None:
    """A further leg: larger images, a learning rate that starts afresh."""
    train(pipe, seconds, seed + 1, lr=1e-3, orders=_LATER_ORDERS, snapshot=snapshot)


def draw(
    pipe: FluxKontextPipeline, references: Sequence[Image.Image], instructions: Sequence[str], seeds: Sequence[int],
    steps: int = 10,
) -> list[Image.Image]:  # fmt: skip
    """Edited images through diffusers' own pipeline, at the size of the references (all of one size, square)."""
    side = references[0].width
    return pipe(
        image=list(references), prompt=list(instructions), height=side, width=side, max_area=side * side,
        num_inference_steps=steps, guidance_scale=GUIDANCE, max_sequence_length=TEXT_TOKENS, _auto_resize=False,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
    ).images  # fmt: skip
