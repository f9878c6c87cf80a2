"""The training loop and the flow-matching loss that all toy models share."""

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from diffusers import FluxPipeline
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import nn

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
