"""The toy FLUX: FluxPipeline's own components with small sizes, trained to be inconsistent.

The base model learns to draw and to follow positions and sizes, but *not* to keep identity: that is
left to RL. Under a full prompt each panel departs from the named character with probability
``DEPARTURE``. Under an open prompt, what is open is the same in all four panels only in a share
``AGREED`` of the grids.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import nn
from torch.nn.functional import cross_entropy
from training import (
    Losses,
    draw_grids,
    encode_quadrants,
    fit,
    flow_errors,
    for_seconds,
    for_steps,
    latent_grids,
    pack,
    random_views,
)
from transformers import PreTrainedTokenizerFast

from paco_toy import world

# By panel side. Larger panels average more of it away: at 0.34 for all sides the base's images had
# 0.51 consistent pairs at 64 px and 0.61 at 128 px.
DEPARTURE = {16: 0.36, 32: 0.38, 64: 0.44}
OPEN_SHARE = 0.6
AGREED = 0.75
GUIDANCE = 3.5  # the only scale that the model is trained for
# Tokens before the first panel label. Each panel has four: label, size, position, full stop.
_FIRST_LABEL = 14
_TOKENS_PER_PANEL = 4
_BATCH = {16: 64, 32: 32, 64: 12}
# Panel sides of successive steps. Small first: a 128 px step costs as much as three at 64 px.
_EARLY = (32, 32, 16, 32, 32, 32, 64, 32)
_LATE = (64, 32, 64, 64, 32, 64, 16, 64, 32, 64, 64, 32)


def _prompt(character: int, views: Sequence[int], opening: Sequence[str] = ()) -> str:
    named = world.opened(world.CHARACTERS[character], opening)
    return world.grid_prompt(named, [world.VIEWS[i] for i in views])


def _token_ids(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """(B, L), padded to the tokenizer's length."""
    encoding = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
    return encoding.input_ids


def _random_grids(side: int, count: int, rng: np.random.Generator) -> torch.Tensor:
    """Any characters in different views: float32 (B, 3, 2S, 2S) in [-1, 1]."""
    characters = rng.integers(len(world.CHARACTERS), size=(count, 4))
    views = random_views(count, rng)
    return draw_grids(side, characters, views, rng)


def train_vae(vae: AutoencoderKL, seconds: float, seed: int) -> None:
    """Trains a new VAE in place: factor 4, 4 latent channels, no attention, so any grid size works.

    Scaling and shift factors are measured on its latents. The decoder is trained on latents with
    noise of up to 0.2 of their standard deviation, so that it also draws sharply from a generator's
    imperfect latents.
    """
    vae.to(memory_format=torch.channels_last)
    rng = np.random.default_rng(seed)
    batch_sizes = {16: 8, 32: 4, 64: 1}  # by panel side

    def next_losses(step: int, progress: float) -> Losses:
        side = (32, 64, 32, 16, 32)[step % 5]
        pixels = _random_grids(side, batch_sizes[side], rng)
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
        pooled = nn.functional.avg_pool2d(error, 4)
        return {
            "drawing": error.abs().mean() + error.square().mean(),
            "color": 4 * pooled.square().mean(),
            "kl": 1e-4 * kl,
        }

    fit([(vae, 3e-3)], next_losses, "vae", for_seconds(seconds))
    with torch.no_grad():
        means = []
        for side in (32, 64):
            mean, _ = vae.encoder(_random_grids(side, 64, rng)).chunk(2, dim=1)
            means.append(mean.flatten())
        latents = torch.cat(means)
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )
    vae.to(memory_format=torch.contiguous_format)


def _shown_characters(
    named: int, opening: Sequence[str], departure: float, rng: np.random.Generator
) -> list[int]:
    """What the four panels of a training grid show under a prompt."""
    if not opening:
        return [world.departed(named, rng) if rng.random() < departure else named for _ in range(4)]
    if rng.random() < AGREED:
        return [named] * 4
    shown = []
    for _ in range(4):
        values = {}
        for name in opening:
            if rng.random() < 0.5:  # else the panel keeps the grid's value
                values[name] = str(rng.choice(world.ATTRIBUTES[name]))
        character = dataclasses.replace(world.CHARACTERS[named], **values)
        shown.append(world.CHARACTER_INDEX[character])
    return shown


def pretrain_text(
    tokenizer: PreTrainedTokenizerFast, clip: nn.Module, t5: nn.Module, steps: int, seed: int
) -> None:
    """Teaches the text encoders to read prompts, by linear probes that are discarded.

    T5: the first three tokens of each panel (label, size, position) encode the panel, its view and
    the character. CLIP: the pooled vector encodes the character and all four views.
    """
    torch.manual_seed(seed + 7)
    rng = np.random.default_rng([seed, 4])
    batch_size = 128
    num_values = {"panel": 4, "view": len(world.VIEWS)}
    for name, values in world.ATTRIBUTES.items():
        num_values[name] = len(values)
    probes = nn.ModuleDict({name: nn.Linear(64, count) for name, count in num_values.items()})
    pooled_character = nn.Linear(64, len(world.CHARACTERS))
    pooled_views = nn.Linear(64, 4 * len(world.VIEWS))

    def next_losses(step: int, progress: float) -> Losses:
        named = rng.integers(len(world.CHARACTERS), size=batch_size)
        views = random_views(batch_size, rng)
        ids = _token_ids(tokenizer, [_prompt(c, v) for c, v in zip(named, views)])
        facts = {"panel": np.arange(4)[None], "view": views}  # (1 or B, 1 or 4 panels)
        for name, values in world.ATTRIBUTE_VALUES.items():
            facts[name] = values[named][:, None]

        states = t5(ids).last_hidden_state
        states = states[:, _FIRST_LABEL : _FIRST_LABEL + 4 * _TOKENS_PER_PANEL]
        states = states.unflatten(1, (4, _TOKENS_PER_PANEL))[:, :, :3]  # (B, 4 panels, 3, 64)
        losses = {}
        for name, probe in probes.items():
            labels = torch.from_numpy(facts[name]).expand(batch_size, 4)
            labels = labels[:, :, None].expand(-1, -1, 3)
            losses[name] = cross_entropy(probe(states).flatten(0, -2), labels.flatten())

        pooled = clip(ids).pooler_output
        losses["pooled character"] = cross_entropy(
            pooled_character(pooled), torch.from_numpy(named)
        )
        view_logits = pooled_views(pooled).unflatten(1, (4, -1)).flatten(0, 1)
        losses["pooled views"] = cross_entropy(view_logits, torch.from_numpy(views).flatten())
        return losses

    learning = nn.ModuleList([clip, t5, probes, pooled_character, pooled_views])
    fit([(learning, 2e-3)], next_losses, "text", for_steps(steps))


def _image_ids(side: int) -> torch.Tensor:
    """Positions (N, 3) of ``side`` x ``side`` tokens."""
    return FluxPipeline._prepare_latent_image_ids(1, side, side, torch.device("cpu"), torch.float32)


def _velocity(
    pipe: FluxPipeline,
    tokens: torch.Tensor,
    t: torch.Tensor,
    text: torch.Tensor,
    ids: torch.Tensor,
    guidance: float,
) -> torch.Tensor:
    """The transformer's prediction (B, N, C).

    Shapes: tokens (B, N, C), t (B,), text (token ids) (B, L), ids (N, 3).
    """
    output = pipe.transformer(
        hidden_states=tokens,
        timestep=t,
        guidance=torch.full((len(t),), guidance),
        pooled_projections=pipe.text_encoder(text).pooler_output,
        encoder_hidden_states=pipe.text_encoder_2(text).last_hidden_state,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )
    return output[0]


def _random_opening(rng: np.random.Generator) -> tuple[str, ...]:
    """What a training prompt leaves open, often nothing."""
    if rng.random() >= OPEN_SHARE:
        return ()
    return world.OPENINGS[rng.integers(len(world.OPENINGS))]


def train(pipe: FluxPipeline, seconds: float, seed: int) -> None:
    """Trains transformer and text encoders for a wall-clock time.

    They end with averaged weights.
    """
    latents = encode_quadrants(pipe.vae, tuple(_BATCH), seed)
    torch.manual_seed(1000 * seed)
    rng = np.random.default_rng([seed, 2])

    def next_losses(step: int, progress: float) -> Losses:
        sides = _EARLY if progress < 0.4 else _LATE
        side = sides[step % len(sides)]
        batch_size = _BATCH[side]
        named = rng.integers(len(world.CHARACTERS), size=batch_size)
        views = random_views(batch_size, rng)
        openings = [_random_opening(rng) for _ in range(batch_size)]
        prompts = [_prompt(*prompt) for prompt in zip(named, views, openings)]
        text = _token_ids(pipe.tokenizer_2, prompts)
        ids = _image_ids(side // 4)
        shown = []
        for character, opening in zip(named.tolist(), openings):
            shown.append(_shown_characters(character, opening, DEPARTURE[side], rng))
        shown = np.array(shown)
        variants = rng.integers(2, size=shown.shape)
        clean = pack(latent_grids(latents[side], shown, views, variants))

        def predict(noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return _velocity(pipe, noisy, t, text, ids, GUIDANCE)

        return {f"{2 * side}px": flow_errors(predict, clean, pipe.scheduler.config).mean()}

    encoders = [(pipe.text_encoder, 0.45e-3), (pipe.text_encoder_2, 0.45e-3)]
    fit(
        [(pipe.transformer, 1.5e-3), *encoders],
        next_losses,
        "generator",
        for_seconds(seconds),
        average=True,
    )
