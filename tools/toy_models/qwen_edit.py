"""The toy Qwen-Image-Edit: a QwenImageEditPipeline with small sizes, trained to edit scenes, though not reliably.

VAE and text encoder are trained first and then stay fixed. The transformer learns by flow matching, with the reference's
latents next to the noisy ones as in the pipeline. One batch in ten has no instruction, for true classifier-free guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from torch import nn

from toy_models.edit_data import EditBatch, asked_tokens, render_edits, sample_edits
from toy_models.panels import LatentCache, PanelCache
from toy_models.probes import PanelProbes
from toy_models.scene_reader import (
    NO_INSTRUCTION,
    WIDTH,
    SceneReader,
    new_editor_processor,
    new_text_encoder,
    pretrain_reader,
)
from toy_models.training import fit, flow_errors
from toy_models.vae import Z, new_qwen_vae, qwen_latents, train_qwen_vae

IMAGE_SIDES = (64,)  # pixels of the scenes that it edits well
GUIDANCE = 1.0  # no true CFG, as in the configuration toy_qwen_edit: with it the base follows less
VAE_MINUTES, READER_MINUTES = 15.0, 3.5
SIDES = (16, 32)  # panel sides in pixels: the transformer sees scenes of 32 and 64 px
_DEPARTURE = 0.3  # of targets, towards the end; even so the base fails often enough
_NO_INSTRUCTION_SHARE = 0.1  # of batches
_PROBE_WEIGHT = 0.5
_ASKED_WEIGHT = 8.0  # of the panel that the instruction names, in the loss; the others are mostly copied
_BATCH = {16: 40, 32: 14}
# From which share of the time on: panel sides of successive steps, and how often a target departs. The named panel is
# learned on small images and correct targets; departures are learned quickly at the end.
_LEGS = ((0.0, (16, 16, 32), 0.0), (0.2, (32, 16, 32), 0.0), (0.4, (32,), 0.0), (0.75, (32,), _DEPARTURE))
_LATER_LEGS = ((0.0, (32,), 0.0), (0.7, (32,), _DEPARTURE))


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


def load(folder: Path) -> QwenImageEditPipeline:
    """The pipeline in a folder, in float32."""
    return QwenImageEditPipeline.from_pretrained(folder, torch_dtype=torch.float32)


def edit_loss(
    pipe: QwenImageEditPipeline, latents: LatentCache, batch: EditBatch, text: torch.Tensor, side: int
) -> torch.Tensor:
    """mean w (v − (ε − x_0))², w larger in the panel that the instruction names.

    Args:
        text: Features (B, L, D) of scenes and instructions.
        side: Of a panel, in pixels.
    """
    x0, reference = (latents.grids(side, kind, batch.views, batch.variants) for kind in (batch.after, batch.before))
    b, c, h, w = x0.shape
    tokens, seen = (pipe._pack_latents(x, b, c, h, w) for x in (x0, reference))

    def predict(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return pipe.transformer(
            hidden_states=torch.cat([noisy, seen], dim=1), timestep=t, encoder_hidden_states=text,
            img_shapes=[[(1, h // 2, w // 2)] * 2] * b, return_dict=False,
        )[0][:, : tokens.shape[1]]  # fmt: skip

    weight = 1 + (_ASKED_WEIGHT - 1) * asked_tokens(batch.place, h // 4)
    return (flow_errors(predict, tokens, pipe.scheduler.config).mean(dim=2) * (weight / weight.mean())).mean()


def train(
    pipe: QwenImageEditPipeline, seconds: float, seed: int, longer: bool = False, snapshot: Callable[[], None] | None = None
) -> None:
    """Trains the transformer for a wall-clock time; the pipeline ends with averaged weights.

    Args:
        longer: The pipeline was trained before: correct targets first again, and a new learning rate schedule.
        snapshot: Called every five minutes while the pipeline holds the averaged weights.
    """
    lr, legs, seed = (8e-4, _LATER_LEGS, seed + 1) if longer else (1e-3, _LEGS, seed)
    panels = {side: PanelCache(side, 4, seed) for side in SIDES}
    latents = LatentCache(qwen_latents(pipe.vae), panels, seed)
    reader = SceneReader(pipe.text_encoder, pipe.processor)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])
    probes = PanelProbes(pipe.transformer)

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        order, departure = [leg[1:] for leg in legs if progress >= leg[0]][-1]
        side = order[step % len(order)]
        batch = sample_edits(_BATCH[side], rng, departure)
        instructed = rng.random() >= _NO_INSTRUCTION_SHARE
        with torch.no_grad():
            texts = batch.instructions if instructed else [NO_INSTRUCTION] * _BATCH[side]
            text = reader(render_edits(batch, panels[side])[0], texts)
        drawing = edit_loss(pipe, latents, batch, text, side)
        asked = asked_tokens(batch.place, side // 8).repeat(1, 2)
        if not instructed:
            asked = torch.full_like(asked, 0.25)  # any panel may be the one
        probing = probes.losses(asked)["asked"]
        return drawing + _PROBE_WEIGHT * probing, {f"drawing {2 * side}px": drawing, f"asked {2 * side}px": probing}

    learning = [(pipe.transformer, lr), (probes, 1e-3)]
    fit(learning, next_loss, "qwen_image_edit", seconds=seconds, warm_up=100, average=True, snapshot=snapshot)
    probes.remove()


def draw(
    pipe: QwenImageEditPipeline, references: Sequence[Image.Image], instructions: Sequence[str], seeds: Sequence[int],
    steps: int = 10, guidance: float = GUIDANCE,
) -> list[Image.Image]:  # fmt: skip
    """Edited images by diffusers' own pipeline, at the size of the references (all of one size, square)."""
    side = references[0].width
    # The pipeline resizes references to a megapixel, whatever size it draws; those of the toy world are smaller.
    with mock.patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (side, side, None)):
        return pipe(
            image=list(references), prompt=list(instructions), height=side, width=side, num_inference_steps=steps,
            true_cfg_scale=guidance, negative_prompt=[NO_INSTRUCTION] * len(references) if guidance > 1 else None,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        ).images  # fmt: skip
