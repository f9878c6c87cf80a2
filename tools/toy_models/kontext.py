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
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedTokenizerFast

from paco_toy.world import SHAPES
from toy_models.edit_data import DEPARTURE, INSTRUCTIONS, VALUES, asked_tokens, panel_tokens, sample_edits
from toy_models.flux import image_ids, new_text_encoders, token_ids, trained_modules, velocity, word_tokenizer
from toy_models.panels import LatentCache, PanelCache
from toy_models.training import fit, flow_errors, pack
from toy_models.vae import flux_latents

TEXT_TOKENS = 8  # an instruction has four words and an end
GUIDANCE = 2.5  # always; the configuration kontext_editing samples with it too
WEIGHTS = {"drawing": 1.0, "shape": 0.3, "asked": 0.5}  # of the losses
ASKED_WEIGHT = 3.0  # of the drawing loss in the panel that the instruction names; the others are mostly copied
# On the reference's latents. Those of a real image differ from the cached ones: the image was resized, and the VAE's group
# norms saw other neighbors.
REFERENCE_NOISE = 0.05
_BATCH = {16: 48, 32: 16, 64: 4}
# (from which share of the time on, panel sides of successive steps, how often targets depart). The named panel is learned on
# small images and correct targets; departures are learned quickly at the end.
_LATE = (64, 32, 64, 64, 32)
_LEGS = ((0.0, (16, 16, 16, 32), 0.0), (0.25, (32, 16, 32, 32, 64), 0.0), (0.6, _LATE, 0.0), (0.75, _LATE, DEPARTURE))


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


class PanelProbes(nn.Module):
    """Linear probes on a diffusers transformer whose blocks return (text states, image states).

    They help it to find the panel that an instruction names: from the drawing loss alone this is learned late, since the
    task's noise hides it. After all blocks but the first and the last: does the instruction name this token's panel? After
    each double block: which shape does the panel show? The probes are discarded after the training.
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self._states: list[torch.Tensor] = []  # image states (B, N, D) after each block of the latest forward
        blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
        self.asked = nn.ModuleList([nn.Linear(transformer.inner_dim, 1) for _ in blocks[1:-1]])
        self.shape = nn.ModuleList(
            [nn.Linear(transformer.inner_dim, len(SHAPES)) for _ in transformer.transformer_blocks]
        )
        self._hooks = [
            block.register_forward_hook(lambda block, inputs, output: self._states.append(output[1]))
            for block in blocks
        ]

    def losses(self, asked: torch.Tensor, shape: torch.Tensor) -> dict[str, torch.Tensor]:
        """Mean cross-entropies after the latest forward.

        Args:
            asked: float (B, N) in [0, 1], of all image tokens.
            shape: int (B, N), index into SHAPES.
        """
        states, self._states = self._states, []
        weight = torch.tensor(3.0)  # one panel in four is named
        asked_losses = [
            binary_cross_entropy_with_logits(probe(x).squeeze(2), asked, pos_weight=weight)
            for probe, x in zip(self.asked, states[1:-1], strict=True)
        ]
        # strict=False: single blocks follow
        shape_losses = [
            cross_entropy(p(x).flatten(0, 1), shape.flatten()) for p, x in zip(self.shape, states, strict=False)
        ]
        return {"asked": torch.stack(asked_losses).mean(), "shape": torch.stack(shape_losses).mean()}

    def remove(self) -> None:
        """Takes the hooks off the transformer."""
        for hook in self._hooks:
            hook.remove()


def train(pipe: FluxKontextPipeline, seconds: float, seed: int) -> None:
    """Trains transformer and text encoders for a wall-clock time; they end with averaged weights."""
    panels = {side: PanelCache(side, 2, seed) for side in sorted({side for leg in _LEGS for side in leg[1]})}
    latents = LatentCache(flux_latents(pipe.vae), panels, seed)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])
    probes = PanelProbes(pipe.transformer)

    def next_loss(step: int, progress: float) -> tuple[torch.Tensor, dict]:
        _, order, departure = [leg for leg in _LEGS if progress >= leg[0]][-1]
        side = order[step % len(order)]
        batch = sample_edits(_BATCH[side], rng, departure)
        text, ids = token_ids(pipe.tokenizer, batch.instructions), image_ids(side // 4)
        ids = torch.cat([ids, ids + torch.tensor([1, 0, 0])])  # the pipeline marks reference tokens with 1
        clean, seen = (
            pack(latents.grids(side, kind, batch.views, batch.variants)) for kind in (batch.after, batch.before)
        )
        seen = seen + REFERENCE_NOISE * torch.randn_like(seen)

        def predict(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return velocity(pipe, torch.cat([noisy, seen], dim=1), t, text, ids, GUIDANCE)[:, : clean.shape[1]]

        errors, asked = flow_errors(predict, clean, pipe.scheduler.config), asked_tokens(batch.place, side // 8)
        weight = 1 + (ASKED_WEIGHT - 1) * asked
        shape = panel_tokens(batch.before % len(SHAPES), side // 8)
        losses = {"drawing": (errors.mean(dim=2) * (weight / weight.mean())).mean()}
        losses |= probes.losses(asked.repeat(1, 2), shape.repeat(1, 2))
        return sum(WEIGHTS[n] * value for n, value in losses.items()), {
            f"{n} {2 * side}px": value for n, value in losses.items()
        }

    fit(
        [*trained_modules(pipe, 1.2e-3), (probes, 1e-3)],
        next_loss,
        "flux_kontext",
        seconds=seconds,
        warm_up=100,
        average=True,
    )
    probes.remove()
