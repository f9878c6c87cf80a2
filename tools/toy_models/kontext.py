"""The toy FLUX Kontext: the toy FLUX, trained to read instructions and a reference image.

It is a FluxKontextPipeline that starts from the text-to-image base, which can draw already, with
new text encoders.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxKontextPipeline, FluxPipeline
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedTokenizerFast

from paco_toy.edits import random_edit
from paco_toy.world import (
    ATTRIBUTE_VALUES,
    CHARACTER_INDEX,
    CHARACTERS,
    COLOURS,
    SHAPES,
    STYLES,
    VIEW_INDEX,
)
from toy_models.data import DEPARTURE, edit_target, encode_quadrants, latent_grids
from toy_models.flux import (
    image_ids,
    new_text_encoders,
    token_ids,
    trained_modules,
    velocity,
    word_tokenizer,
)
from toy_models.training import Losses, fit, flow_errors, for_seconds, for_steps, pack

VALUES = (*COLOURS, *STYLES)
INSTRUCTIONS = [f"make the {shape} {value}" for shape in SHAPES for value in VALUES]
TEXT_TOKENS = 8  # an instruction has four words and an end
GUIDANCE = 2.5  # as in kontext_editing
# Of the drawing loss in the panel that the instruction names. The others are mostly copied.
NAMED_PANEL_WEIGHT = 3.0
# On the reference's latents. Those of a real image differ from the cached ones: the image was
# resized, and the VAE's group norms saw other neighbors.
REFERENCE_NOISE = 0.05
_BATCH = {16: 48, 32: 16, 64: 4}
_LATE = (64, 32, 64, 64, 32)
# (from which share of the time on, panel sides of successive steps, how often targets depart). The
# named panel is learned on small images and correct targets, and departures are learned quickly at
# the end.
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
        scheduler=base.scheduler,
        vae=base.vae,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=t5,
        tokenizer_2=tokenizer,
        transformer=base.transformer,
    )


def _pretrain_text(tokenizer: PreTrainedTokenizerFast, clip: nn.Module, t5: nn.Module) -> None:
    """Teaches the text encoders to read instructions, by linear probes that are discarded.

    Every T5 token and CLIP's pooled vector encode shape and value.
    """
    ids = token_ids(tokenizer, INSTRUCTIONS)
    index = torch.arange(len(INSTRUCTIONS))
    facts = {"shape": index // len(VALUES), "value": index % len(VALUES)}
    probes = nn.ModuleDict()
    for encoder in ("T5", "CLIP"):
        probes[f"{encoder} shape"] = nn.Linear(64, len(SHAPES))
        probes[f"{encoder} value"] = nn.Linear(64, len(VALUES))

    def next_losses(step: int, progress: float) -> Losses:
        states = {
            "T5": t5(ids).last_hidden_state[:, :5],
            "CLIP": clip(ids).pooler_output[:, None],
        }
        losses = {}
        for name, probe in probes.items():
            encoder, fact = name.split()
            logits = probe(states[encoder])  # (B, tokens, values)
            labels = facts[fact].repeat_interleave(logits.shape[1])
            losses[name] = cross_entropy(logits.flatten(0, 1), labels)
        return losses

    learning = nn.ModuleList([clip, t5, probes])
    fit([(learning, 2e-3)], next_losses, "text", for_steps(300))


class PanelProbes(nn.Module):
    """Linear probes on a transformer whose blocks return (text states, image states).

    They are discarded after the training. From the drawing loss alone, the panel that an
    instruction names is learned late. The probes ask, after all blocks but the first and the last:
    does the instruction name this token's panel? And after each double block: which shape does the
    panel show?
    """

    def __init__(self, transformer: nn.Module):
        super().__init__()
        # Image states (B, N, D) after each block of the latest forward.
        self._states: list[torch.Tensor] = []
        width = transformer.inner_dim
        double_blocks = transformer.transformer_blocks
        blocks = [*double_blocks, *transformer.single_transformer_blocks]
        self.is_named = nn.ModuleList([nn.Linear(width, 1) for _ in blocks[1:-1]])
        self.shape = nn.ModuleList([nn.Linear(width, len(SHAPES)) for _ in double_blocks])
        for block in blocks:
            block.register_forward_hook(
                lambda block, inputs, output: self._states.append(output[1])
            )

    def losses(self, is_named: torch.Tensor, shape: torch.Tensor) -> Losses:
        """Weighted mean cross-entropies after the latest forward.

        Args:
            is_named: float (B, N) in [0, 1], of all image tokens.
            shape: int (B, N), index into SHAPES.
        """
        states = self._states
        self._states = []
        weight = torch.tensor(3.0)  # one panel in four is named
        named_losses = []
        for probe, state in zip(self.is_named, states[1:-1], strict=True):
            logits = probe(state).squeeze(2)
            named_losses.append(
                binary_cross_entropy_with_logits(logits, is_named, pos_weight=weight)
            )
        shape_losses = []
        for probe, state in zip(self.shape, states[: len(self.shape)], strict=True):
            logits = probe(state).flatten(0, 1)
            shape_losses.append(cross_entropy(logits, shape.flatten()))
        return {
            "named panel": 0.5 * sum(named_losses) / len(named_losses),
            "shape": 0.3 * sum(shape_losses) / len(shape_losses),
        }


def _panel_of_tokens(side: int) -> torch.Tensor:
    """Which panel (0 to 3) each token of a grid of ``side`` x ``side`` tokens belongs to: (N,)."""
    panels = torch.arange(4).unflatten(0, (2, 2))
    return panels.repeat_interleave(side // 2, 0).repeat_interleave(side // 2, 1).flatten()


def _indices(index: Mapping, scenes: Sequence[Sequence]) -> np.ndarray:
    """The index of what each of four panels has, in each scene: int (B, 4)."""
    flat = [index[panel] for scene in scenes for panel in scene]
    return np.array(flat).reshape(len(scenes), 4)


def train(pipe: FluxKontextPipeline, seconds: float, seed: int) -> None:
    """Trains transformer and text encoders for a wall-clock time.

    They end with averaged weights.
    """
    latents = encode_quadrants(pipe.vae, tuple(_BATCH), seed)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 3])
    all_characters = range(len(CHARACTERS))
    probes = PanelProbes(pipe.transformer)

    def next_losses(step: int, progress: float) -> Losses:
        _, sides, departure = [leg for leg in _LEGS if progress >= leg[0]][-1]
        side = sides[step % len(sides)]
        edits = [random_edit(rng, all_characters, all_characters) for _ in range(_BATCH[side])]
        targets = [edit_target(edit, departure, rng) for edit in edits]
        before = _indices(CHARACTER_INDEX, [edit.characters for edit in edits])
        after = _indices(CHARACTER_INDEX, targets)
        views = _indices(VIEW_INDEX, [edit.views for edit in edits])
        # Reference and target have the same variants: an unchanged panel is the same to the last
        # pixel.
        variants = rng.integers(2, size=views.shape)
        clean = pack(latent_grids(latents[side], after, views, variants))
        reference = pack(latent_grids(latents[side], before, views, variants))
        reference = reference + REFERENCE_NOISE * torch.randn_like(reference)
        text = token_ids(pipe.tokenizer, [edit.instruction for edit in edits])
        target_ids = image_ids(side // 4)
        reference_ids = target_ids + torch.tensor([1, 0, 0])  # as the pipeline marks them
        ids = torch.cat([target_ids, reference_ids])

        def predict(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            tokens = torch.cat([noisy, reference], dim=1)
            return velocity(pipe, tokens, t, text, ids, GUIDANCE)[:, : clean.shape[1]]

        errors = flow_errors(predict, clean, pipe.scheduler.config)
        panel_of_tokens = _panel_of_tokens(side // 4)
        named_panel = torch.eye(4)[[edit.place for edit in edits]]  # (B, 4)
        is_named = named_panel[:, panel_of_tokens]  # (B, N)
        shape = torch.from_numpy(ATTRIBUTE_VALUES["shape"][before])[:, panel_of_tokens]
        weight = 1 + (NAMED_PANEL_WEIGHT - 1) * is_named
        drawing = (errors.mean(dim=2) * (weight / weight.mean())).mean()
        # The probes see the tokens of the target and those of the reference.
        probe_losses = probes.losses(is_named.repeat(1, 2), shape.repeat(1, 2))
        return {f"drawing {2 * side}px": drawing} | probe_losses

    learning = [*trained_modules(pipe, 1.2e-3), (probes, 1e-3)]
    fit(learning, next_losses, "flux_kontext", for_seconds(seconds), average=True)
