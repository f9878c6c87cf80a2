"""The toy Qwen-Image-Edit: a QwenImageEditPipeline with small sizes, trained to edit scenes, though not reliably.

VAE and text encoder are trained first and then stay fixed. The transformer learns by flow matching, with the reference's
latents next to the noisy ones as in the pipeline. One batch in ten has no instruction, for true classifier-free guidance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from torch import nn

from toy_models.edit_data import EditBatch, render_edits
from toy_models.editors import drawing_loss, train_editor
from toy_models.panels import LatentCache, PanelCache
from toy_models.scene_reader import (
    NO_INSTRUCTION,
    WIDTH,
    SceneReader,
    new_editor_processor,
    new_text_encoder,
    pretrain_reader,
)  # fmt: skip
from toy_models.vae import Z, new_qwen_vae, qwen_latents, train_qwen_vae

IMAGE_SIDES = (64,)  # pixels of the scenes that it edits well
VAE_MINUTES, READER_MINUTES = 15.0, 3.5
_NO_INSTRUCTION_SHARE = 0.1  # of batches
_BATCH = {16: 40, 32: 14}  # by panel side: the transformer sees scenes of 32 and 64 px
# See train_editor. The named panel is learned on small images and correct targets; departures are learned quickly at the end,
# and fewer than Kontext's: the base fails often enough.
_LEGS = ((0.0, (16, 16, 32), 0.0), (0.2, (32, 16, 32), 0.0), (0.4, (32,), 0.0), (0.75, (32,), 0.3))
_LATER_LEGS = ((0.0, (32,), 0.0), (0.7, (32,), 0.3))


def new(models: Path, seed: int) -> QwenImageEditPipeline:
    """A pipeline whose VAE and text encoder are trained (about 20 minutes), its transformer not. ``models`` is not used."""
    vae = new_qwen_vae(seed)
    panels = {side: PanelCache(side, 4, seed) for side in (16, 32, 64)}
    train_qwen_vae(vae, panels, 60 * VAE_MINUTES, seed)
    processor = new_editor_processor()
    reader = SceneReader(new_text_encoder(processor.tokenizer, seed), processor)
    pretrain_reader(reader, {side: panels[side] for side in (32, 64)}, 60 * READER_MINUTES, seed)
    return assemble(vae, reader, seed)


def assemble(vae: nn.Module, reader: SceneReader, seed: int) -> QwenImageEditPipeline:
    """A pipeline of these parts and an untrained transformer of 2.4 M parameters."""
    torch.manual_seed(seed)
    transformer = QwenImageTransformer2DModel(
        in_channels=4 * Z, out_channels=Z, num_layers=4, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(  # Qwen-Image's settings
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, base_image_seq_len=256, max_image_seq_len=8192, shift=1.0,
        shift_terminal=0.02, time_shift_type="exponential",
    )  # fmt: skip
    return QwenImageEditPipeline(
        scheduler=scheduler, vae=vae, text_encoder=reader.encoder, tokenizer=reader.processor.tokenizer,
        processor=reader.processor, transformer=transformer,
    )  # fmt: skip


def edit_loss(
    pipe: QwenImageEditPipeline, latents: LatentCache, batch: EditBatch, text: torch.Tensor, side: int
) -> torch.Tensor:
    """``drawing_loss`` of the pipeline's transformer for features ``text`` (B, L, D) of scenes and instructions."""

    def predict(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return pipe.transformer(
            hidden_states=tokens, timestep=t, encoder_hidden_states=text, return_dict=False,
            img_shapes=[[(1, side // 4, side // 4)] * 2] * len(tokens),
        )[0]  # fmt: skip

    return drawing_loss(predict, latents, batch, side, pipe.scheduler.config, 8.0)


def train(pipe: QwenImageEditPipeline, seconds: float, seed: int, longer: bool, snapshot: Callable[[], None]) -> None:
    """``train_editor`` on the transformer; ``longer``: again, with correct targets first and a new schedule."""
    lr, legs, seed = (8e-4, _LATER_LEGS, seed + 1) if longer else (1e-3, _LEGS, seed)
    panels = {side: PanelCache(side, 4, seed) for side in _BATCH}
    latents = LatentCache(qwen_latents(pipe.vae), panels, seed)
    reader = SceneReader(pipe.text_encoder, pipe.processor)

    def draw(batch: EditBatch, side: int, rng: np.random.Generator) -> tuple[torch.Tensor, bool]:
        instructed = rng.random() >= _NO_INSTRUCTION_SHARE
        texts = batch.instructions if instructed else [NO_INSTRUCTION] * len(batch.place)
        with torch.no_grad():
            text = reader(render_edits(batch, panels[side])[0], texts)
        return edit_loss(pipe, latents, batch, text, side), instructed

    train_editor("qwen_image_edit", [(pipe.transformer, lr)], draw, legs, _BATCH, seconds, seed, snapshot=snapshot)


def draw(pipe: QwenImageEditPipeline, size: int, **options) -> list[Image.Image]:
    """Edited images by diffusers' own pipeline; its other ``options`` as in ``toy_models.quality``.

    There is no true CFG, as in the configuration toy_qwen_edit: with it the base follows less.
    """
    # The pipeline resizes references to a megapixel, whatever size it draws; those of the toy world are smaller.
    with mock.patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (size, size, None)):
        return pipe(true_cfg_scale=1.0, **options).images
