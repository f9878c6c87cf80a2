"""The toy FLUX: FluxPipeline's own components with small sizes, trained to be inconsistent.

The base model learns to draw and to follow positions and sizes, but *not* to keep identity: that is
left to RL. Under a full prompt each panel departs from the named character with probability
``DEPARTURE``. Under an open prompt, what is open is the same in all four panels only in a share
``AGREED`` of the grids. s is a panel's side in latents.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from einops import rearrange
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy
from training import draw_grids, fit, random_views
from transformers import PreTrainedTokenizerFast

from paco_toy import world

NUM_CHARACTERS = len(world.CHARACTERS)
NUM_VIEWS = len(world.VIEWS)
# By panel side. Larger panels average more of it away: at 0.34 for all sides the base's images had
# 0.51 consistent pairs at 64 px and 0.61 at 128 px.
DEPARTURE = {16: 0.36, 32: 0.38, 64: 0.44}
OPEN_SHARE = 0.6
AGREED = 0.75
# About what one core does in 6, 2 and 110 minutes (measured: 0.13, 0.2 and 0.72 s a step).
VAE_STEPS = 3_000
TEXT_STEPS = 600
STEPS = 9_200
# Tokens before the first panel label. Each panel has four: label, size, position, full stop.
_FIRST_LABEL = 14
_TOKENS_PER_PANEL = 4
_BATCH = {16: 64, 32: 32, 64: 12}
# Panel sides of successive steps. Small first: a 128 px step costs as much as three at 64 px.
_EARLY = (32, 32, 16, 32, 32, 32, 64, 32)
_LATE = (64, 32, 64, 64, 32, 64, 16, 64, 32, 64, 64, 32)


def train_vae(vae: AutoencoderKL, steps: int) -> None:
    """Trains a new VAE in place: factor 4, 4 latent channels, no attention, so any grid size works.

    Scaling and shift factors are measured on its latents. The decoder is trained on latents with
    noise of up to 0.2 of their standard deviation, so that it also draws sharply from a generator's
    imperfect latents.
    """
    vae.to(memory_format=torch.channels_last)
    rng = np.random.default_rng(0)
    batch_sizes = {16: 8, 32: 4, 64: 1}  # by panel side

    def random_grids(side: int, count: int) -> torch.Tensor:
        characters = rng.integers(NUM_CHARACTERS, size=(count, 4))
        return draw_grids(side, characters, random_views(count, rng), rng)

    def next_loss(step: int) -> torch.Tensor:
        side = (32, 64, 32, 16, 32)[step % 5]
        pixels = random_grids(side, batch_sizes[side])
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        mean, log_var = vae.encoder(pixels).chunk(2, dim=1)
        noise = 0.2 * mean.detach().std() * torch.rand(len(mean), 1, 1, 1)
        decoded = vae.decoder(mean + noise * torch.randn_like(mean))
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        # Most of a panel is white, so what is not white counts three times.
        is_drawn = pixels.amin(dim=1, keepdim=True) < 0.9
        error = (decoded - pixels) * (1 + 2 * is_drawn)
        # The pooled term is about color. Without it outlines are learned first and colors only
        # minutes later.
        color = 4 * avg_pool2d(error, 4).square().mean()
        return error.abs().mean() + error.square().mean() + color + 1e-4 * kl

    fit([(vae, 3e-3)], next_loss, steps)
    with torch.no_grad():
        means = [vae.encoder(random_grids(side, 64))[:, :4].flatten() for side in (32, 64)]
    latents = torch.cat(means)
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )
    vae.to(memory_format=torch.contiguous_format)


def _token_ids(
    tokenizer: PreTrainedTokenizerFast,
    characters: Sequence[world.Character],
    views: np.ndarray,
) -> torch.Tensor:
    """Prompts (B, L), padded to the tokenizer's length; ``views``: int (B, 4)."""
    prompts = []
    for character, places in zip(characters, views, strict=True):
        prompts.append(world.grid_prompt(character, [world.VIEWS[place] for place in places]))
    encoding = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
    return encoding.input_ids


def pretrain_text(pipe: FluxPipeline, steps: int) -> None:
    """Teaches the text encoders to read prompts, by linear probes that are discarded.

    T5: the first three tokens of each panel (label, size, position) encode the panel, its view and
    the character. CLIP: the pooled vector encodes the character and all four views.
    """
    torch.manual_seed(7)
    rng = np.random.default_rng([0, 4])
    batch_size = 128
    num_values = {"panel": 4, "view": NUM_VIEWS}
    num_values |= {name: len(values) for name, values in world.ATTRIBUTES.items()}
    probes = nn.ModuleDict({name: nn.Linear(64, count) for name, count in num_values.items()})
    pooled_character = nn.Linear(64, NUM_CHARACTERS)
    pooled_views = nn.Linear(64, 4 * NUM_VIEWS)

    def next_loss(step: int) -> torch.Tensor:
        named = rng.integers(NUM_CHARACTERS, size=batch_size)
        views = random_views(batch_size, rng)
        ids = _token_ids(pipe.tokenizer_2, [world.CHARACTERS[number] for number in named], views)
        facts = {"panel": np.arange(4)[None], "view": views}  # (1 or B, 1 or 4 panels)
        for name, values in world.ATTRIBUTE_VALUES.items():
            facts[name] = values[named][:, None]

        states = pipe.text_encoder_2(ids).last_hidden_state
        states = states[:, _FIRST_LABEL : _FIRST_LABEL + 4 * _TOKENS_PER_PANEL]
        states = states.unflatten(1, (4, _TOKENS_PER_PANEL))[:, :, :3]  # (B, 4 panels, 3, 64)
        losses = []
        for name, probe in probes.items():
            labels = torch.from_numpy(facts[name])[:, :, None].expand(batch_size, 4, 3)
            losses.append(cross_entropy(probe(states).flatten(0, -2), labels.flatten()))

        pooled = pipe.text_encoder(ids).pooler_output
        losses.append(cross_entropy(pooled_character(pooled), torch.from_numpy(named)))
        view_logits = pooled_views(pooled).unflatten(1, (4, -1)).flatten(0, 1)
        losses.append(cross_entropy(view_logits, torch.from_numpy(views).flatten()))
        return sum(losses)

    learning = [pipe.text_encoder, pipe.text_encoder_2, probes, pooled_character, pooled_views]
    fit([(nn.ModuleList(learning), 2e-3)], next_loss, steps)


@torch.no_grad()
def encode_quadrants(vae: AutoencoderKL, side: int, rng: np.random.Generator) -> torch.Tensor:
    """Quadrants of VAE-encoded grids of panels of S pixels, so that training needs no VAE.

    A panel's latents depend slightly on its place (padding) and its neighbors (group norms), so
    each quadrant is cut from whole random grids and used only in the same place.

    Returns:
        float32 (4, characters, views, 2 variants, C, s, s).
    """
    num_kinds = NUM_CHARACTERS * NUM_VIEWS
    variants = []
    for _ in range(2):
        # Each quadrant shows each kind once.
        order = np.stack([rng.permutation(num_kinds) for _ in range(4)], axis=1)
        latents = []
        for kinds in np.array_split(order, 16):
            grids = draw_grids(side, *np.divmod(kinds, NUM_VIEWS), rng)
            z = vae.encode(grids).latent_dist.mode()
            # FluxPipeline uses them like this.
            latents.append((z - vae.config.shift_factor) * vae.config.scaling_factor)
        quadrants = rearrange(torch.cat(latents), "b k (r h) (c w) -> (r c) b k h w", r=2, c=2)
        by_kind = torch.from_numpy(order.T).argsort(dim=1)
        variants.append(quadrants[torch.arange(4)[:, None], by_kind])
    return torch.stack(variants, dim=2).unflatten(1, (NUM_CHARACTERS, NUM_VIEWS))


def _shown_characters(
    named: int, opening: Sequence[str], departure: float, rng: np.random.Generator
) -> list[int]:
    """What the four panels of a training grid show under a prompt."""
    if opening and rng.random() < AGREED:
        return [named] * 4
    shown = []
    for _ in range(4):
        values = {}
        for name in opening:
            if rng.random() < 0.5:  # else the panel keeps the grid's value
                values[name] = str(rng.choice(world.ATTRIBUTES[name]))
        character = dataclasses.replace(world.CHARACTERS[named], **values)
        if not opening and rng.random() < departure:
            character = world.CHARACTERS[world.departed(named, rng)]
        shown.append(world.CHARACTER_INDEX[character])
    return shown


def train(pipe: FluxPipeline, steps: int) -> None:
    """Trains transformer and text encoders, which end with averaged weights."""
    rng = np.random.default_rng([0, 1])
    latents = {side: encode_quadrants(pipe.vae, side, rng) for side in _BATCH}
    torch.manual_seed(0)
    rng = np.random.default_rng([0, 2])

    def next_loss(step: int) -> torch.Tensor:
        sides = _EARLY if step < 0.4 * steps else _LATE
        side = sides[step % len(sides)]
        batch_size = _BATCH[side]
        named = rng.integers(NUM_CHARACTERS, size=batch_size)
        views = random_views(batch_size, rng)
        openings = []  # what each prompt leaves open, often nothing
        for _ in range(batch_size):
            is_open = rng.random() < OPEN_SHARE
            openings.append(world.OPENINGS[rng.integers(len(world.OPENINGS))] if is_open else ())
        characters = []
        shown = []
        for number, opening in zip(named.tolist(), openings, strict=True):
            characters.append(world.opened(world.CHARACTERS[number], opening))
            shown.append(_shown_characters(number, opening, DEPARTURE[side], rng))
        variants = torch.from_numpy(rng.integers(2, size=(batch_size, 4)))
        kinds = (torch.tensor(shown), torch.from_numpy(views), variants)
        panels = latents[side][torch.arange(4), *kinds]
        # Two rows and columns of panels, as tokens of 2x2 latents: (B, N, 4·C)
        clean = rearrange(panels, "b (r c) k (h p) (w q) -> b (r h c w) (k p q)", r=2, p=2, q=2)

        if torch.rand(()) < 0.7:  # most times are in the middle, where the image is decided
            t = torch.sigmoid(torch.randn(batch_size) * 1.2)
        else:
            t = torch.rand(batch_size)
        shift = math.exp(calculate_shift(clean.shape[1]))  # the pipeline's
        t = shift * t / (1 + (shift - 1) * t)
        noise = torch.randn_like(clean)
        text = _token_ids(pipe.tokenizer_2, characters, views)
        velocity = pipe.transformer(
            hidden_states=(1 - t[:, None, None]) * clean + t[:, None, None] * noise,
            timestep=t,
            guidance=torch.full((batch_size,), 3.5),  # the only scale that it is trained for
            pooled_projections=pipe.text_encoder(text).pooler_output,
            encoder_hidden_states=pipe.text_encoder_2(text).last_hidden_state,
            txt_ids=torch.zeros(text.shape[1], 3),
            img_ids=pipe._prepare_latent_image_ids(1, side // 4, side // 4, "cpu", torch.float32),
        ).sample
        return (velocity - (noise - clean)).square().mean()

    learning = [
        (pipe.transformer, 1.5e-3),
        (pipe.text_encoder, 0.45e-3),
        (pipe.text_encoder_2, 0.45e-3),
    ]
    fit(learning, next_loss, steps, average=0.996)
