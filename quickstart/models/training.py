"""What all toy models share: the training loop, the flow-matching loss, and panels to learn from.

Rendered panels and their latents are kept in memory, so that training waits neither for the
renderer nor for a VAE. Characters and views are indices into ``paco_toy.world``'s CHARACTERS and
VIEWS. S is a panel's side in pixels, s in latents.
"""

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn

from paco_toy.world import CHARACTERS, VIEWS, random_jitter, render_panel, to_uint8

logger = logging.getLogger(__name__)
Losses = dict[str, torch.Tensor]
Progress = Callable[[int], float]  # steps that are done -> share of the training that is done


def for_seconds(seconds: float) -> Progress:
    """A training that ends after a wall-clock time from now."""
    started = time.monotonic()
    return lambda step: (time.monotonic() - started) / seconds


def for_steps(steps: int) -> Progress:
    """A training of a fixed number of steps."""
    return lambda step: step / steps


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w) as tokens (B, h·w/4, 4·C)."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def flow_errors(velocity: Callable, clean: torch.Tensor, config) -> torch.Tensor:
    """Squared errors (v − (ε − x_0))² at random times, float32 (B, N, C).

    The times are shifted as the pipeline shifts them for N tokens.

    Args:
        velocity: (noisy tokens (B, N, C), times (B,)) -> predicted velocity (B, N, C).
        clean: x_0, packed tokens (B, N, C).
        config: Configuration of the pipeline's scheduler.
    """
    batch_size, num_tokens = clean.shape[:2]
    if torch.rand(()) < 0.7:  # most times are in the middle, where the image is decided
        t = torch.sigmoid(torch.randn(batch_size) * 1.2)
    else:
        t = torch.rand(batch_size)
    mu = calculate_shift(
        num_tokens,
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    shift = math.exp(mu)
    t = shift * t / (1 + (shift - 1) * t)
    noise = torch.randn_like(clean)
    noisy = (1 - t[:, None, None]) * clean + t[:, None, None] * noise
    return (velocity(noisy, t) - (noise - clean)).square()


def fit(
    learning: Sequence[tuple[nn.Module, float]],
    next_losses: Callable[[int, float], Losses],
    label: str,
    progress: Progress,
    *,
    decay: float = 0.5,
    average: bool = False,
) -> None:
    """Trains modules in place with AdamW; they end in eval mode.

    Args:
        learning: Modules with their highest learning rates.
        next_losses: (step, share of the training that is done) -> losses of a new batch, whose sum
            is minimized.
        label: Name of the training in the log.
        progress: Says how much of the training is done: ``for_seconds`` or ``for_steps``.
        decay: Share of the training, at its end, over which the learning rate falls linearly to a
            hundredth of the highest.
        average: End with an exponential moving average of the weights.
    """
    modules = nn.ModuleList([module for module, _ in learning]).train()
    groups = [{"params": list(module.parameters()), "rate": rate} for module, rate in learning]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    averaged = copy.deepcopy(modules).requires_grad_(False) if average else None
    started = time.monotonic()
    next_log = 0.0
    for step in itertools.count():
        done = progress(step)
        if done >= 1:
            break
        warm_up = min(1.0, (step + 1) / 100)
        cool_down = max(0.01, min(1.0, (1 - done) / decay))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * warm_up * cool_down

        losses = next_losses(step, done)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()

        if averaged is not None:
            # The average is short at first, so that it forgets the untrained weights.
            keep = min(0.996, (2 + step) / (11 + step))
            torch._foreach_lerp_(list(averaged.parameters()), list(modules.parameters()), 1 - keep)
        elapsed = time.monotonic() - started
        if elapsed > next_log:
            values = " ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            logger.info("%s %3.0f%% %4.0f s step %d %s", label, 100 * done, elapsed, step, values)
            next_log += 20
    if averaged is not None:
        modules.load_state_dict(averaged.state_dict())
    modules.eval()


def random_views(count: int, rng: np.random.Generator) -> np.ndarray:
    """Four different views per grid: int (count, 4)."""
    return rng.random((count, len(VIEWS))).argsort(axis=1)[:, :4]


@cache
def _panel(side: int, character: int, view: int, variant: int) -> np.ndarray:
    jitter = random_jitter(np.random.default_rng([side, character, view, variant]))
    return to_uint8(render_panel(CHARACTERS[character], VIEWS[view], side, jitter))


def draw(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Panels for index arrays of any equal shape (...): uint8 (..., S, S, 3).

    Each has one of four jitters.
    """
    variants = rng.integers(4, size=characters.shape)
    kinds = np.stack([characters, views, variants], axis=-1).reshape(-1, 3)
    panels = [_panel(side, *kind) for kind in kinds.tolist()]
    return np.stack(panels).reshape(*characters.shape, side, side, 3)


def draw_grids(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    """2x2 grids for (B, 4) indices, panels row-major: float32 (B, 3, 2S, 2S) in [-1, 1]."""
    panels = torch.from_numpy(draw(side, characters, views, rng)).float() / 127.5 - 1
    return _assemble(panels.movedim(-1, 2))


def _assemble(panels: torch.Tensor) -> torch.Tensor:
    """(B, 4, C, S, S) to (B, C, 2S, 2S)."""
    rows_and_columns = panels.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5)
    return rows_and_columns.flatten(4).flatten(2, 3)


def _quadrants(grids: torch.Tensor) -> torch.Tensor:
    """(B, C, 2s, 2s) to (4, B, C, s, s): the inverse of ``_assemble``, quadrants first."""
    rows_and_columns = grids.unflatten(3, (2, -1)).unflatten(2, (2, -1))
    return rows_and_columns.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)


@torch.no_grad()
def encode_quadrants(
    vae: AutoencoderKL, sides: Sequence[int], seed: int
) -> dict[int, torch.Tensor]:
    """Quadrants of VAE-encoded grids, for each panel side in pixels.

    A panel's latents depend slightly on its place (padding) and its neighbors (group norms), so
    each quadrant is cut from whole random grids and used only in the same place.

    Returns:
        side -> float32 (4, characters, views, 2 variants, C, s, s).
    """
    rng = np.random.default_rng([seed, 1])
    num_kinds = len(CHARACTERS) * len(VIEWS)
    latents = {}
    for side in sides:
        shape = (vae.config.latent_channels, side // 4, side // 4)
        store = torch.empty(4, num_kinds, 2, *shape)
        for variant in range(2):
            # Each quadrant shows each kind once.
            order = np.stack([rng.permutation(num_kinds) for _ in range(4)], axis=1)
            for kinds in np.array_split(order, 16):
                characters, views = np.divmod(kinds, len(VIEWS))
                grids = draw_grids(side, characters, views, rng)
                z = vae.encode(grids).latent_dist.mode()
                # FluxPipeline uses them like this.
                z = (z - vae.config.shift_factor) * vae.config.scaling_factor
                quadrant = torch.arange(4)[:, None]
                store[quadrant, torch.from_numpy(kinds.T), variant] = _quadrants(z)
        latents[side] = store.unflatten(1, (len(CHARACTERS), len(VIEWS)))
    return latents


def latent_grids(
    quadrants: torch.Tensor, characters: np.ndarray, views: np.ndarray, variants: np.ndarray
) -> torch.Tensor:
    """Latents of grids for (B, 4) indices, variants 0 or 1: float32 (B, C, 2s, 2s)."""
    indices = [torch.from_numpy(index) for index in (characters, views, variants)]
    return _assemble(quadrants[torch.arange(4), *indices])
