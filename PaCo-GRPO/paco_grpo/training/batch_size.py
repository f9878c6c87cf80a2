"""How many images a process samples at once, from the memory that is free (``config.sample.batch_size = 0``)."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from ml_collections import ConfigDict

from paco_grpo.policies import Policy
from paco_grpo.training.collect import at_size
from paco_grpo.types import Item

logger = logging.getLogger(__name__)

_SHARE = 0.85  # of the device's memory that may be used
_MOST = 32  # more images than that make no forward of a large model more efficient
_ON_CPU = 16  # main memory is shared with others, so what is free says little, and batches matter less


def settle_batch_size(
    config: ConfigDict, policy: Policy, items: list[Item], accelerator: Accelerator, folder: Path
) -> int:
    """The batch of a run: ``config.sample.batch_size``, or else what fits, equal on all processes.

    A resumed run takes what it took before (plan.json), so that it computes the same bits. The numbers of an epoch do
    not depend on the batch except by rounding.
    """
    asked = config.sample.batch_size
    if asked:
        return asked
    plan = folder / "plan.json"
    if config.resume_from and plan.is_file():
        return json.loads(plan.read_text())["sample_batch_size"]
    samples = config.sample.unique_sample_num_per_epoch * config.sample.num_images_per_prompt
    share = max(1, samples // accelerator.num_processes)
    fits = _ON_CPU if policy.device.type == "cpu" else _fitting(config, policy, items)
    fits = int(accelerator.gather(torch.tensor([fits], device=accelerator.device)).min())
    chosen = largest_divisor(share, min(fits, _MOST))
    logger.info("sample.batch_size: %d images (%d would fit; %d an epoch on each process)", chosen, fits, share)
    return chosen


def largest_divisor(number: int, most: int) -> int:
    """Largest divisor of ``number`` ≥ 1 that is not above ``most`` ≥ 1."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def fitting(peak: Callable[[int], int], limit: int) -> int:
    """Images whose peak memory stays below ``limit`` bytes, at least 1: what ``peak(1)`` and ``peak(2)`` say, extended."""
    one, two = peak(1), peak(2)
    return max(1, 1 + (limit - one) // max(1, two - one))


def _fitting(config: ConfigDict, policy: Policy, items: list[Item]) -> int:
    device = policy.device
    sized = [at_size(item, config.train.resolution, config.item_size, policy) for item in items]
    item = dataclasses.replace(max(sized, key=lambda item: item.height * item.width))
    size = item.height, item.width
    conditioning = policy.encode([item])
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)

    @torch.no_grad()
    def peak(images: int) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        latents = policy.initial_latents(list(range(images)), *size)
        rows = conditioning.select(torch.zeros(images, dtype=torch.int64))
        policy.velocity(latents, torch.ones(images, device=device), rows, *size)
        policy.decode(latents, *size)
        return torch.cuda.max_memory_allocated(device)

    peak(1)  # what the first forward allocates for good
    return fitting(peak, int(_SHARE * (free + held)))
