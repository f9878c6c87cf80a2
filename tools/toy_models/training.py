"""The training loop and the flow-matching loss that all toy models share."""

import copy
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


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w) as tokens (B, h·w/4, 4·C)."""
    return FluxPipeline._pack_latents(latents, *latents.shape)


def flow_errors(velocity: Callable, clean: torch.Tensor, config) -> torch.Tensor:
    """Squared errors (v − (ε − x_0))² at random times, shifted as by the pipeline for N tokens: float32 (B, N, C).

    Args:
        velocity: (noisy tokens (B, N, C), times (B,)) -> predicted velocity (B, N, C).
        clean: x_0, packed tokens (B, N, C).
        config: Configuration of the pipeline's scheduler.
    """
    count, tokens = clean.shape[:2]
    t = torch.sigmoid(torch.randn(count) * 1.2) if torch.rand(()) < 0.7 else torch.rand(count)
    sizes = (
        config.base_image_seq_len,
        config.max_image_seq_len,
        config.base_shift,
        config.max_shift,
    )
    shift = math.exp(calculate_shift(tokens, *sizes))
    t = shift * t / (1 + (shift - 1) * t)
    noise = torch.randn_like(clean)
    noisy = (1 - t[:, None, None]) * clean + t[:, None, None] * noise
    return (velocity(noisy, t) - (noise - clean)).square()


def fit(
    learning: Sequence[tuple[nn.Module, float]],
    next_losses: Callable[[int, float], Losses],
    label: str,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    decay: float = 0.5,
    average: bool = False,
) -> None:
    """Trains modules in place with AdamW; they end in eval mode.

    Args:
        learning: Modules with their highest learning rates.
        next_losses: (step, share of the training that is done) -> losses of a new batch, whose sum is minimized.
        seconds: Wall-clock limit; ``steps`` otherwise.
        decay: Share of the training, at its end, over which the learning rate falls linearly to a hundredth of the highest.
        average: End with an exponential moving average of the weights.
    """
    modules = nn.ModuleList([module for module, _ in learning]).train()
    groups = [{"params": list(module.parameters()), "rate": rate} for module, rate in learning]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    averaged = copy.deepcopy(modules).requires_grad_(False) if average else None
    started, step, log_at = time.monotonic(), 0, 0.0
    while True:
        elapsed = time.monotonic() - started
        progress = step / steps if steps else elapsed / seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = (
                group["rate"]
                * min(1.0, (step + 1) / 100)
                * max(0.01, min(1.0, (1 - progress) / decay))
            )
        losses = next_losses(step, progress)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        step += 1
        if averaged:
            share = 1 - min(0.996, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(averaged.parameters()), list(modules.parameters()), share)
        if elapsed > log_at:
            shown = " ".join(f"{name} {value:.4f}" for name, value in losses.items())
            logger.info(
                "%s %3.0f%% %4.0f s step %d %s", label, 100 * progress, elapsed, step, shown
            )
            log_at += 20
    if averaged:
        modules.load_state_dict(averaged.state_dict())
    modules.eval()
