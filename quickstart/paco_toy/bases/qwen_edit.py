"""The toy Qwen-Image-Edit: a QwenImageEditPipeline with small sizes, trained to edit scenes, though not reliably as told.

VAE and text encoder are trained first (`paco_toy.bases.qwen_vae`, `paco_toy.bases.qwen_text`) and stay as they are; the
transformer then learns by flow matching, reference latents beside the noisy ones as the pipeline has them. One batch in ten
has no instruction, for true classifier-free guidance.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from torch import nn

from paco_toy.bases.edit_batches import EditBatch, draw_edits, draw_pixels
from paco_toy.bases.flow import shifted_times, train_average, with_weights
from paco_toy.bases.generator import LatentCache
from paco_toy.bases.panels import PanelCache
from paco_toy.bases.probes import AskedProbes, asked_tokens
from paco_toy.bases.qwen_text import (
    NO_INSTRUCTION,
    WIDTH,
    SceneReader,
    new_editor_processor,
    new_text_encoder,
    pretrain_reader,
)
from paco_toy.bases.qwen_vae import Z, new_qwen_vae, normalised_latents, train_qwen_vae

logger = logging.getLogger(__name__)

NAME = "qwen_image_edit"
IMAGE_SIDES = (64,)  # pixels of the scenes that it edits well
GUIDANCE = 1.0  # no true CFG, as `toy_qwen_edit` samples: the base follows less with it
VAE_MINUTES, READER_MINUTES = 15.0, 3.5
SIDES = (16, 32)  # panel sides in pixels: the transformer sees scenes of 32 and 64 px
_DEPARTURE = 0.3  # of targets, towards the end; on its own the base fails often enough
_UNTOLD = 0.1  # share of batches without an instruction
_PROBE_WEIGHT = 0.5
_ASKED_WEIGHT = 8.0  # of the panel that the instruction names, in the loss; the others are mostly copied
_BATCH = {16: 40, 32: 14}
# From which share of the time on: what panel side each step trains on, in turn, and how often a target departs from what is
# asked. What is asked is learned on small images and careful targets; careless ones come last and are learned soon.
_LEGS = ((0.0, (16, 16, 32), 0.0), (0.2, (32, 16, 32), 0.0), (0.4, (32,), 0.0), (0.75, (32,), _DEPARTURE))
# Qwen-Image's own scheduler settings.
_SCHEDULER = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192,
    "shift": 1.0, "shift_terminal": 0.02, "time_shift_type": "exponential",
}  # fmt: skip


def new(models: Path, seed: int) -> QwenImageEditPipeline:
    """A pipeline whose VAE and text encoder are trained (about 20 minutes), its transformer not. ``models`` is not needed."""
    vae = new_qwen_vae(seed)
    train_qwen_vae(vae, {side: PanelCache(side, 4, seed) for side in (16, 32, 64)}, 60 * VAE_MINUTES, seed)
    processor = new_editor_processor()
    reader = SceneReader(new_text_encoder(processor.tokenizer, seed), processor)
    pretrain_reader(reader, {side: PanelCache(side, 4, seed) for side in (32, 64)}, 60 * READER_MINUTES, seed)
    return assemble(vae, reader, seed)


def assemble(vae: nn.Module, reader: SceneReader, seed: int) -> QwenImageEditPipeline:
    """A pipeline of these parts and an untrained transformer of 2.4 M parameters."""
    torch.manual_seed(seed)
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * Z, out_channels=Z, num_layers=4, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return QwenImageEditPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**_SCHEDULER), vae=vae, text_encoder=reader.encoder,
        tokenizer=reader.processor.tokenizer, processor=reader.processor, transformer=transformer,
    )  # fmt: skip


def load(folder: Path) -> QwenImageEditPipeline:
    """The pipeline of a folder, in float32."""
    return QwenImageEditPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def _panels(seed: int) -> dict[int, PanelCache]:
    return {side: PanelCache(side, 4, seed) for side in SIDES}


def edit_loss(
    pipe: QwenImageEditPipeline, latents: LatentCache, batch: EditBatch, text: torch.Tensor, side: int
) -> torch.Tensor:
    """mean w (v − (ε − x_0))² over the drawn tokens, w larger in the panel that is asked for.

    Args:
        text: features (B, L, D) of scenes and instructions.
        side: of a panel, in pixels.
    """
    x0, reference = (latents.grids(side, kind, batch.views, batch.variants) for kind in (batch.after, batch.before))
    b, c, h, w = x0.shape
    tokens, seen = (pipe._pack_latents(x, b, c, h, w) for x in (x0, reference))
    t = shifted_times(b, tokens.shape[1], pipe.scheduler.config)
    noise = torch.randn_like(tokens)
    noisy = (1 - t[:, None, None]) * tokens + t[:, None, None] * noise
    velocity = pipe.transformer(
        hidden_states=torch.cat([noisy, seen], dim=1), timestep=t, encoder_hidden_states=text,
        img_shapes=[[(1, h // 2, w // 2)] * 2] * b, return_dict=False,
    )[0][:, : tokens.shape[1]]  # fmt: skip
    weight = 1 + (_ASKED_WEIGHT - 1) * asked_tokens(batch.place, h // 4)
    weight = weight / weight.mean()
    return ((velocity - (noise - tokens)).square().mean(dim=2) * weight).mean()


def train(
    pipe: QwenImageEditPipeline,
    seconds: float,
    seed: int,
    lr: float = 1e-3,
    legs: Sequence[tuple[float, Sequence[int], float]] = _LEGS,
    snapshot: Callable[[QwenImageEditPipeline], None] | None = None,
) -> None:
    """Trains the transformer for a fixed wall-clock time; the pipeline ends with the averaged weights.

    Args:
        legs: (share of the time, panel sides in turn from then on, departure from then on).
        snapshot: Handed a copy with the averaged weights every five minutes, for a look while training goes on.
    """
    panels = _panels(seed)
    with torch.no_grad():
        latents = LatentCache(lambda pixels: normalised_latents(pipe.vae, pixels), panels, seed)
    reader = SceneReader(pipe.text_encoder, pipe.processor)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])
    probes = AskedProbes(pipe.transformer)

    def next_loss(step: int, progress: float) -> tuple[int, torch.Tensor]:
        order, departure = [leg[1:] for leg in legs if progress >= leg[0]][-1]
        side = order[step % len(order)]
        batch = draw_edits(_BATCH[side], rng, departure)
        told = batch.instructions if rng.random() >= _UNTOLD else [NO_INSTRUCTION] * _BATCH[side]
        with torch.no_grad():
            text = reader(draw_pixels(batch, panels[side])[0], told)
        drawing = edit_loss(pipe, latents, batch, text, side)
        asked = asked_tokens(batch.place, side // 8).repeat(1, 2)
        if told is not batch.instructions:
            asked = torch.full_like(asked, 0.25)  # nothing is asked: each panel may be it
        return 2 * side, drawing + _PROBE_WEIGHT * probes.loss(asked)

    def look(averaged: nn.ModuleList) -> None:
        copied = copy.deepcopy(pipe)
        with_weights(nn.ModuleList([copied.transformer]), averaged[:1])
        snapshot(copied)

    train_average(
        nn.ModuleList([pipe.transformer, probes]), (lr, 1e-3), next_loss, seconds, label=NAME,
        look=look if snapshot else None, look_every=300.0,
    )  # fmt: skip
    probes.remove()


def train_longer(pipe: QwenImageEditPipeline, seconds: float, seed: int, snapshot: Callable | None = None) -> None:
    """On from what was trained: first on careful targets, careless ones last again; the learning rate starts afresh."""
    train(pipe, seconds, seed + 1, lr=8e-4, legs=((0.0, (32,), 0.0), (0.7, (32,), _DEPARTURE)), snapshot=snapshot)


def draw(
    pipe: QwenImageEditPipeline, references: Sequence[Image.Image], instructions: Sequence[str], seeds: Sequence[int],
    steps: int = 10, guidance: float = GUIDANCE,
) -> list[Image.Image]:  # fmt: skip
    """Edited images through diffusers' own pipeline, at the size of the references (all of one size, square)."""
    side = references[0].width
    # The pipeline reads references at a megapixel, whatever it is asked to draw: the toy world has smaller ones.
    with mock.patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (side, side, None)):
        return pipe(
            image=list(references), prompt=list(instructions), height=side, width=side, num_inference_steps=steps,
            true_cfg_scale=guidance, negative_prompt=[NO_INSTRUCTION] * len(references) if guidance > 1 else None,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images  # fmt: skip
