"""What the training of every toy generator shares: flow-matching times, and a loop that keeps an average of the weights."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import distributed as dist
from torch import nn

logger = logging.getLogger(__name__)


def shifted_times(count: int, tokens: int, config) -> torch.Tensor:
    """Logit-normal times widened over [0, 1], moved by the pipeline's own shift for this number of drawn tokens.

    Args:
        config: of the pipeline's scheduler.
    Returns:
        float32 (count,).
    """
    t = torch.sigmoid(torch.randn(count) * 1.2) if torch.rand(()) < 0.7 else torch.rand(count)
    shift = math.exp(
        calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
    )
    return shift * t / (1 + (shift - 1) * t)


def train_average(
    modules: nn.ModuleList,
    rates: Sequence[float],
    next_loss: Callable[[int, float], tuple[int, torch.Tensor]],
    seconds: float,
    *,
    label: str = "generator",
    look: Callable[[nn.ModuleList], None] | None = None,
    look_every: float = 600.0,
) -> None:
    """Trains modules together for a fixed wall-clock time; they end in eval mode with the averaged weights.

    Under torchrun every process draws its own batches and gradients are averaged; the clock of process 0 counts.

    Args:
        modules: those that learn.
        rates: The highest learning rate of each.
        next_loss: (step, share of the time that is over) -> (image side in pixels, for the log; loss of a new batch).
        look: Handed a copy of the averaged weights every ``look_every`` seconds, while training goes on.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    modules.train()
    parameters = [p for p in modules.parameters() if p.requires_grad]
    _broadcast(modules)
    groups = [{"params": list(m.parameters()), "rate": r} for m, r in zip(modules, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=max(rates), betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    average = copy.deepcopy(modules).requires_grad_(False)
    started, step, log_at, look_at, recent = time.monotonic(), 0, 0.0, look_every, {}
    while (elapsed := _agreed(time.monotonic() - started)) < seconds:
        progress = elapsed / seconds
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * min(1.0, (step + 1) / 100) * max(0.01, min(1.0, (1 - progress) / 0.5))
        side, loss = next_loss(step, progress)
        optimizer.zero_grad()
        loss.backward()
        _average_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        decay = min(0.996, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.parameters()), list(modules.parameters()), 1 - decay)
        recent[side] = 0.98 * recent.get(side, loss.item()) + 0.02 * loss.item()
        if elapsed > log_at and rank == 0:
            losses = " ".join(f"{s}px {v:.4f}" for s, v in sorted(recent.items()))
            logger.info("%s %4.0f/%.0f s step %d %s", label, elapsed, seconds, step, losses)
            log_at += 30
        if look and rank == 0 and elapsed > look_at:
            look(copy.deepcopy(average))
            look_at += look_every
    with_weights(modules, average)


def with_weights(modules: nn.ModuleList, source: nn.ModuleList) -> None:
    """Gives modules the weights of others of the same kind, and puts them in eval mode."""
    for module, other in zip(modules, source, strict=True):
        module.load_state_dict(other.state_dict())
        module.eval()


def _agreed(elapsed: float) -> float:
    """Process 0's clock, so that all processes stop at the same step."""
    if not dist.is_initialized():
        return elapsed
    clock = torch.tensor([elapsed], dtype=torch.float64)
    dist.broadcast(clock, 0)
    return float(clock)


def _broadcast(modules: nn.Module) -> None:
    if dist.is_initialized():
        for tensor in modules.state_dict().values():
            dist.broadcast(tensor, 0)


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    if not dist.is_initialized():
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for grad, averaged in zip(grads, torch._utils._unflatten_dense_tensors(flat / dist.get_world_size(), grads)):
        grad.copy_(averaged)
