"""The toy FLUX Kontext: the toy FLUX, trained to read instructions and a reference image, as a FluxKontextPipeline.

It starts from the text-to-image base, which can draw already. The text encoders are new and small: an instruction has four
words.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from paco_toy.world import SHAPES
from toy_models.edit_data import DEPARTURE, INSTRUCTIONS, VALUES, EditBatch
from toy_models.editors import drawing_loss, train_editor
from toy_models.flux import image_ids, new_text_encoders, token_ids, trained_modules, velocity, word_tokenizer
from toy_models.panels import LatentCache, PanelCache
from toy_models.training import fit
from toy_models.vae import flux_latents

IMAGE_SIDES = (64, 128)  # pixels of the scenes that it edits well
TEXT_TOKENS = 8  # an instruction has four words and an end
GUIDANCE = 2.5  # always; the configuration kontext_editing samples with it too
_BATCH = {16: 48, 32: 16, 64: 4}
# See train_editor. The named panel is learned on small images and correct targets; departures are learned quickly at the end.
_LATE, _LONGER = (64, 32, 64, 64, 32), (32, 32, 32, 32, 32, 32, 32, 64)
_LEGS = ((0.0, (16, 16, 16, 32), 0.0), (0.25, (32, 16, 32, 32, 64), 0.0), (0.6, _LATE, 0.0), (0.75, _LATE, DEPARTURE))
_LATER_LEGS = ((0.0, _LONGER, 0.0), (0.75, _LONGER, DEPARTURE))


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


def _pretrain_text(tokenizer: PreTrainedTokenizerFast, clip: nn.Module, t5: nn.Module) -> None:
    """Teaches the text encoders to read instructions: every T5 token and CLIP's pooled vector encode shape and value."""
    ids = token_ids(tokenizer, INSTRUCTIONS)
    wanted = [torch.arange(len(ids)) // len(VALUES), torch.arange(len(ids)) % len(VALUES)]
    probes = nn.ModuleList([nn.Linear(64, count) for _ in range(2) for count in (len(SHAPES), len(VALUES))])

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        states = [t5(ids).last_hidden_state[:, :5], clip(ids).pooler_output[:, None]]
        logits = [probe(states[i // 2]) for i, probe in enumerate(probes)]
        labels = [wanted[i % 2].repeat_interleave(x.shape[1]) for i, x in enumerate(logits)]
        loss = sum(cross_entropy(x.flatten(0, 1), y) for x, y in zip(logits, labels, strict=True))
        return loss, {"loss": loss}

    fit([(nn.ModuleList([clip, t5, probes]), 2e-3)], next_loss, "text", steps=300, floor=0.0, clip=math.inf)


def train(pipe: FluxKontextPipeline, seconds: float, seed: int, longer: bool) -> None:
    """``train_editor`` on transformer and text encoders; ``longer``: again, on larger images and with a new schedule."""
    lr, legs, seed = (1e-3, _LATER_LEGS, seed + 1) if longer else (1.2e-3, _LEGS, seed)
    panels = {side: PanelCache(side, 2, seed) for side in sorted({side for leg in legs for side in leg[1]})}
    latents = LatentCache(flux_latents(pipe.vae), panels, seed)

    def draw(batch: EditBatch, side: int, rng: np.random.Generator) -> tuple[torch.Tensor, bool]:
        text = token_ids(pipe.tokenizer, batch.instructions)
        ids = image_ids(side // 4)
        ids = torch.cat([ids, ids + torch.tensor([1, 0, 0])])  # the pipeline marks reference tokens with 1

        def predict(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return velocity(pipe, tokens, t, text, ids, GUIDANCE)

        return drawing_loss(predict, latents, batch, side, pipe.scheduler.config, 3.0, reference_noise=0.05), True

    learning = trained_modules(pipe, lr)
    train_editor("flux_kontext", learning, draw, legs, _BATCH, seconds, seed, shapes=True)


def draw(pipe: FluxKontextPipeline, size: int, **options) -> list[Image.Image]:
    """Edited images by diffusers' own pipeline; its other ``options`` as in ``toy_models.quality``."""
    return pipe(
        max_area=size * size, guidance_scale=GUIDANCE, max_sequence_length=TEXT_TOKENS, _auto_resize=False, **options
    ).images  # fmt: skip
