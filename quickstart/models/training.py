"""What all toy models share: the training loop, and panels to learn from.

Rendered panels are kept in memory, so that training does not wait for the renderer. Characters and
views are indices into ``paco_toy.world``'s CHARACTERS and VIEWS. S is a panel's side in pixels.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from einops import rearrange
from torch import nn

from paco_toy import world


def fit(
    learning: Sequence[tuple[nn.Module, float]],
    next_loss: Callable[[int], torch.Tensor],
    steps: int,
    *,
    decay: float = 0.5,
    average: float = 0.0,
) -> None:
    """Trains modules in place with AdamW; they end in eval mode.

    Args:
        learning: Modules with their highest learning rates.
        next_loss: step -> loss () of a new batch.
        steps: Optimizer steps.
        decay: Share of the training, at its end, over which the learning rate falls linearly to a
            hundredth of the highest.
        average: Training ends with an exponential moving average of the weights, which keeps this
            share in each step. 0: with the last weights.
    """
    modules = nn.ModuleList([module for module, _ in learning]).train()
    groups = [{"params": list(module.parameters()), "rate": rate} for module, rate in learning]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    averaged = copy.deepcopy(modules).requires_grad_(False)
    for step in range(steps):
        warm_up = min(1.0, (step + 1) / 100)
        cool_down = max(0.01, min(1.0, (1 - step / steps) / decay))
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * warm_up * cool_down

        loss = next_loss(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()

        # The average is short at first, so that it forgets the untrained weights.
        keep = min(average, (2 + step) / (11 + step))
        torch._foreach_lerp_(list(averaged.parameters()), list(modules.parameters()), 1 - keep)
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss:.4f}", flush=True)
    modules.load_state_dict(averaged.state_dict())
    modules.eval()


def random_views(count: int, rng: np.random.Generator) -> np.ndarray:
    """Four different views per grid: int (count, 4)."""
    return rng.random((count, len(world.VIEWS))).argsort(axis=1)[:, :4]


@cache
def _panel(side: int, character: int, view: int, variant: int) -> np.ndarray:
    jitter = world.random_jitter(np.random.default_rng([side, character, view, variant]))
    return world.to_uint8(
        world.render_panel(world.CHARACTERS[character], world.VIEWS[view], side, jitter)
    )


def draw(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Panels for index arrays of any equal shape (...): uint8 (..., S, S, 3).

    Each has one of four jitters.
    """
    variants = rng.integers(4, size=characters.shape)
    draw_all = np.vectorize(_panel, signature="(),(),(),()->(s,s,c)")
    return draw_all(side, characters, views, variants)


def draw_grids(
    side: int, characters: np.ndarray, views: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    """2x2 grids for (B, 4) indices, panels row-major: float32 (B, 3, 2S, 2S) in [-1, 1]."""
    panels = torch.from_numpy(draw(side, characters, views, rng)).float() / 127.5 - 1
    return rearrange(panels, "b (r c) h w rgb -> b rgb (r h) (c w)", r=2)
