"""The toy FLUX Kontext: the toy FLUX, trained to read instructions and a reference image, as a FluxKontextPipeline.

It starts from the text-to-image base, which can draw already, with new text encoders.
"""

from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedTokenizerFast

from paco_toy.edits import random_edit
from paco_toy.world import CHARACTER_INDEX, CHARACTERS, COLOURS, SHAPES, STYLES, VIEW_INDEX
from toy_models.data import DEPARTURE, edit_target, encode_quadrants, latent_grids
from toy_models.flux import (
    image_ids,
    new_text_encoders,
    token_ids,
    trained_modules,
    velocity,
    word_tokenizer,
)
from toy_models.training import Losses, fit, flow_errors, pack

VALUES = (*COLOURS, *STYLES)
INSTRUCTIONS = [f"make the {shape} {value}" for shape in SHAPES for value in VALUES]
TEXT_TOKENS = 8  # an instruction has four words and an end
GUIDANCE = 2.5  # as in kontext_editing
ASKED_WEIGHT = (
    3.0  # of the drawing loss in the panel that the instruction names; the others are mostly copied
)
# On the reference's latents. Those of a real image differ from the cached ones: the image was resized, and the VAE's group
# norms saw other neighbors.
REFERENCE_NOISE = 0.05
_BATCH = {16: 48, 32: 16, 64: 4}
# (from which share of the time on, panel sides of successive steps, how often targets depart). The named panel is learned on
# small images and correct targets; departures are learned quickly at the end.
_LATE = (64, 32, 64, 64, 32)
_LEGS = (
    (0.0, (16, 16, 16, 32), 0.0),
    (0.25, (32, 16, 32, 32, 64), 0.0),
    (0.6, _LATE, 0.0),
    (0.75, _LATE, DEPARTURE),
)


def new(models: Path, seed: int) -> FluxKontextPipeline:
    """A pipeline around the base in ``models``/flux, with text encoders that read instructions."""
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
    probes = nn.ModuleList(
        [nn.Linear(64, count) for _ in range(2) for count in (len(SHAPES), len(VALUES))]
    )

    def next_losses(step: int, progress: float) -> Losses:
        states = [t5(ids).last_hidden_state[:, :5], clip(ids).pooler_output[:, None]]
        logits = [probe(states[i // 2]) for i, probe in enumerate(probes)]
        labels = [wanted[i % 2].repeat_interleave(x.shape[1]) for i, x in enumerate(logits)]
        losses = [cross_entropy(x.flatten(0, 1), y) for x, y in zip(logits, labels, strict=True)]
        return dict(zip(("T5 shape", "T5 value", "CLIP shape", "CLIP value"), losses, strict=True))

    fit([(nn.ModuleList([clip, t5, probes]), 2e-3)], next_losses, "text", steps=300)


class PanelProbes(nn.Module):
    """Linear probes on a transformer whose blocks return (text states, image states), discarded after the training.

    From the drawing loss alone, the panel that an instruction names is learned late. After all blocks but the first and
    the last: does the instruction name this token's panel? After each double block: which shape does the panel show?
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        self._states: list[
            torch.Tensor
        ] = []  # image states (B, N, D) after each block of the latest forward
        blocks, width = (
            [*transformer.transformer_blocks, *transformer.single_transformer_blocks],
            transformer.inner_dim,
        )
        self.asked = nn.ModuleList([nn.Linear(width, 1) for _ in blocks[1:-1]])
        self.shape = nn.ModuleList(
            [nn.Linear(width, len(SHAPES)) for _ in transformer.transformer_blocks]
        )
        for block in blocks:
            block.register_forward_hook(
                lambda block, inputs, output: self._states.append(output[1])
            )

    def losses(self, asked: torch.Tensor, shape: torch.Tensor) -> Losses:
        """Weighted mean cross-entropies after the latest forward.

        Args:
            asked: float (B, N) in [0, 1], of all image tokens.
            shape: int (B, N), index into SHAPES.
        """
        states, self._states = self._states, []
        weight = torch.tensor(3.0)  # one panel in four is named
        logits = [probe(state).squeeze(2) for probe, state in zip(self.asked, states[1:])]
        found = [binary_cross_entropy_with_logits(x, asked, pos_weight=weight) for x in logits]
        shapes = [
            cross_entropy(p(x).flatten(0, 1), shape.flatten()) for p, x in zip(self.shape, states)
        ]
        return {"asked": 0.5 * sum(found) / len(found), "shape": 0.3 * sum(shapes) / len(shapes)}


def train(pipe: FluxKontextPipeline, seconds: float, seed: int) -> None:
    """Trains transformer and text encoders for a wall-clock time; they end with averaged weights."""
    latents = encode_quadrants(pipe.vae, tuple(_BATCH), seed)
    torch.manual_seed(1000 * seed)
    rng, everything = np.random.default_rng([seed, 3]), range(len(CHARACTERS))
    probes = PanelProbes(pipe.transformer)

    def next_losses(step: int, progress: float) -> Losses:
        _, order, departure = [leg for leg in _LEGS if progress >= leg[0]][-1]
        side = order[step % len(order)]
        edits = [random_edit(rng, everything, everything) for _ in range(_BATCH[side])]
        before = np.array([[CHARACTER_INDEX[c] for c in edit.characters] for edit in edits])
        after = np.array(
            [[CHARACTER_INDEX[c] for c in edit_target(edit, departure, rng)] for edit in edits]
        )
        views = np.array([[VIEW_INDEX[v] for v in edit.views] for edit in edits])
        variants = rng.integers(
            2, size=views.shape
        )  # of both: an unchanged panel is the same to the last pixel
        text, ids = (
            token_ids(pipe.tokenizer, [edit.instruction for edit in edits]),
            image_ids(side // 4),
        )
        ids = torch.cat(
            [ids, ids + torch.tensor([1, 0, 0])]
        )  # the pipeline marks reference tokens with 1
        clean, seen = (
            pack(latent_grids(latents[side], kind, views, variants)) for kind in (after, before)
        )
        seen = seen + REFERENCE_NOISE * torch.randn_like(seen)

        def predict(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return velocity(pipe, torch.cat([noisy, seen], dim=1), t, text, ids, GUIDANCE)[
                :, : clean.shape[1]
            ]

        errors = flow_errors(predict, clean, pipe.scheduler.config)
        of_tokens = torch.arange(4).unflatten(0, (2, 2)).repeat_interleave(side // 8, 0)
        of_tokens = of_tokens.repeat_interleave(side // 8, 1).flatten()
        asked = torch.eye(4)[[edit.place for edit in edits]][
            :, of_tokens
        ]  # (B, N): the panel of each token
        shape = torch.from_numpy(before % len(SHAPES))[:, of_tokens]
        weight = 1 + (ASKED_WEIGHT - 1) * asked
        drawing = (errors.mean(dim=2) * (weight / weight.mean())).mean()
        return {f"drawing {2 * side}px": drawing} | probes.losses(
            asked.repeat(1, 2), shape.repeat(1, 2)
        )

    fit(
        [*trained_modules(pipe, 1.2e-3), (probes, 1e-3)],
        next_losses,
        "flux_kontext",
        seconds=seconds,
        average=True,
    )
