"""The sampling half of an epoch: encode, roll out in batches, decode, and hand the images to the rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from paco_grpo.data.sampler import EpochSamples
from paco_grpo.distributed.processes import Replicated, rounds
from paco_grpo.options import RunOptions
from paco_grpo.policies.base import Policy
from paco_grpo.rewards.queue import ScoreQueue
from paco_grpo.sampling.denoise import Sampling
from paco_grpo.sampling.images import Batch, at_size, batches_by_key, sample_images
from paco_grpo.sampling.schedule import sample_noise_steps
from paco_grpo.training.plan import merges_lora, on_cuda
from paco_grpo.types import Conditioning, Item, Rollout


@dataclass
class ItemRows(Conditioning):
    """Replaces the conditioning in a stored rollout: text features are stored once per item, not once per image."""

    rows: torch.Tensor  # (B,) int64, row of each sample in the epoch's conditioning


@dataclass
class Rollouts:
    """What one process sampled in an epoch. Local sample i has global position ``positions[i]``."""

    positions: np.ndarray  # (n,)
    conditioning: Conditioning  # one row per unique item
    parts: list[Rollout]  # conditioning = ItemRows
    keys: list[Hashable]  # per part: parts with equal keys may share a forward (Policy.batch_key)
    samples: list[np.ndarray]  # per part: local sample numbers of its rows

    def batches(self, wanted: Sequence[int], size: int) -> list[np.ndarray]:
        """Local samples ``wanted`` in micro-batches of at most ``size``; each has one image size, order is kept within."""
        keys = [self.keys[self._place[int(sample)][0]] for sample in wanted]
        return [np.asarray(wanted)[batch] for batch in batches_by_key(keys, size)]

    def rollout(self, numbers: Sequence[int]) -> Rollout:
        """Local samples ``numbers``, of one image size, joined in this order, with their conditioning."""
        places = [self._place[int(sample)] for sample in numbers]
        order = sorted(range(len(places)), key=lambda i: places[i])
        parts = []  # a batch mostly comes from few parts, so rows of one part are taken together
        for number in sorted({part for part, _ in places}):
            parts.append(self.parts[number].select([row for part, row in sorted(places) if part == number]))
        joined = Rollout.cat(parts).select(list(np.argsort(order)))
        return dataclasses.replace(joined, conditioning=self.conditioning.select(joined.conditioning.rows))

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        """Local sample → (part, row in it)."""
        return {int(s): (number, row) for number, group in enumerate(self.samples) for row, s in enumerate(group)}


def sample_epoch(
    policy: Policy,
    items: Sequence[Item],
    samples: EpochSamples,
    queue: ScoreQueue,
    options: RunOptions,
    strategy: Replicated,
    *,
    batch_size: int,
    epoch: int,
    on_images: Callable[[list], None] = lambda images: None,
    should_stop: Callable[[], bool] | None = None,
) -> Rollouts:
    """Sample this process's share of an epoch; scores arrive in ``queue`` during sampling.

    Args:
        policy: With the weights to sample from.
        items: The prompt set.
        samples: The epoch over all processes.
        queue: Gets the images; row i of its result is local sample i.
        options: Mostly ``options.sample``.
        strategy: The processes.
        batch_size: Images per forward.
        epoch: For the choice of noise steps.
        on_images: Called with the images of each batch, in order; in another thread where decoding overlaps.
        should_stop: Asked before each batch.

    Raises:
        Stopped: A process asked to stop.
    """
    accelerator, sample = strategy.accelerator, options.sample
    positions = samples.positions_of(accelerator.process_index, accelerator.num_processes)
    item_ids, seeds, group_seeds = (a[positions] for a in (samples.item_ids, samples.seeds, samples.group_seeds))
    unique, rows = np.unique(item_ids, return_inverse=True)
    sized = [at_size(items[i], options.train.resolution, options.item_size, policy) for i in unique]
    conditioning = policy.encode(sized)
    keys = [policy.batch_key(item) for item in sized]
    batches = [
        Batch(batch, sized[rows[batch[0]]].height, sized[rows[batch[0]]].width)
        for batch in batches_by_key([keys[row] for row in rows], batch_size)
    ]

    def inputs(batch: Batch) -> dict[str, Any]:
        batch_rows = torch.from_numpy(rows[batch.numbers])
        shared = {"shared_seeds": group_seeds[batch.numbers].tolist()}
        return {
            "conditioning": conditioning.select(batch_rows),
            "item_ids": item_ids[batch.numbers],
            "seeds": seeds[batch.numbers].tolist(),
            **(shared if sample.same_latent else {}),
        }

    def deliver(images: list, batch: Batch) -> None:
        queue.submit(images, [items[i] for i in item_ids[batch.numbers]], batch.numbers)
        on_images(images)

    filler = batches[0] if strategy.collective_forwards else None
    result = Rollouts(positions, conditioning, [], [], [])
    for batch, rollout in sample_images(
        policy,
        rounds(accelerator, batches, should_stop=should_stop, filler=filler),
        inputs,
        deliver,
        Sampling(
            num_steps=sample.num_steps,
            noise_steps=sample_noise_steps(sample.noise_steps, sample.num_noise_steps, options.seed, epoch),
            noise_level=sample.noise_level,
            cps=sample.cps,
            merge_lora=merges_lora(options, policy.device),
            tail_steps=sample.tail_steps,
            tail_order=sample.tail_order,
        ),
        overlap_decode=on_cuda(options.speed.overlap_decode, policy.device),
    ):
        batch_rows = torch.from_numpy(rows[batch.numbers]).to(rollout.clean_latents.device)
        result.parts.append(dataclasses.replace(rollout, conditioning=ItemRows(batch_rows)))
        result.keys.append(keys[rows[batch.numbers[0]]])
        result.samples.append(np.array(batch.numbers))
    return result
