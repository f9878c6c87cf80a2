"""The sampling half of an epoch: encode, roll out in batches, decode, and deliver the images."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from paco_grpo.options import RunOptions
from paco_grpo.sampling.denoise import Draws, Sampling, rollout, sample_noise_steps
from paco_grpo.sampling.images import Batch, Decoder, at_size, batches_by_key
from paco_grpo.training.plan import Plan, merges_lora
from paco_grpo.training.state import TrainState
from paco_grpo.types import Item, Rollout


@dataclass
class Rollouts:
    """What one process sampled in an epoch of n images a process, N in all.

    A sample's *number* is its index among those of this process, its *position* the one in the
    epoch, over all processes.
    """

    item_ids: np.ndarray  # (N,) by position
    positions: np.ndarray  # (n,) by number
    # (n,) rollouts of batch size 1: views into the sampled batches and their item's conditioning.
    samples: list[Rollout]
    keys: list[Hashable]  # (n,) samples with equal keys may share a forward (``Policy.batch_key``)

    def batches(self, numbers: Sequence[int], size: int) -> list[np.ndarray]:
        """The samples ``numbers`` in micro-batches of one key, of at most ``size``, in order."""
        batches = batches_by_key([self.keys[number] for number in numbers], size)
        return [np.asarray(numbers)[batch] for batch in batches]

    def stack(self, numbers: Sequence[int]) -> Rollout:
        """The samples ``numbers``, of one key, as one rollout."""
        return Rollout.cat([self.samples[number] for number in numbers])


def sample_epoch(
    state: TrainState,
    plan: Plan,
    items: Sequence[Item],
    options: RunOptions,
    deliver: Callable[[list[Image.Image | None], list[Item], list[int]], None],
    should_stop: Callable[[], bool] | None = None,
) -> Rollouts:
    """Sample this process's share of the current epoch.

    ``deliver`` gets the images of each batch, their items and their numbers among this process's
    samples, in another thread where decoding overlaps. ``should_stop`` is asked before each batch,
    and then ``Stopped`` is raised on every process.
    """
    sample = options.sample
    policy = state.policy
    accelerator = state.strategy.accelerator

    # The n samples of this process: which item each is of, and the seeds of its noise.
    samples = state.sampler.samples(state.epoch)
    positions = samples.positions_of(accelerator.process_index, accelerator.num_processes)
    item_ids = samples.item_ids[positions]
    seeds = samples.seeds[positions]
    initial_seeds = samples.initial_seeds[positions]

    # Each item is encoded once, however many images it gets: sample i has row row_of[i]
    # of the conditioning.
    unique_ids, row_of = np.unique(item_ids, return_inverse=True)
    resolution = options.train.resolution
    sized = [at_size(items[i], resolution, options.item_size, policy) for i in unique_ids]
    conditioning = policy.encode(sized)

    # Samples of one size share a forward.
    keys_of_items = [policy.batch_key(item) for item in sized]
    keys = [keys_of_items[row] for row in row_of]
    batches = []
    for numbers in batches_by_key(keys, plan.sample_batch_size):
        first = sized[row_of[numbers[0]]]
        batches.append(Batch(numbers, first.height, first.width))

    sampling = Sampling(
        num_steps=sample.num_steps,
        noise_steps=sample_noise_steps(
            sample.noise_steps, sample.num_noise_steps, options.seed, state.epoch
        ),
        noise_level=sample.noise_level,
        cps=sample.cps,
        merge_lora=merges_lora(options, policy.device),
        tail_steps=sample.tail_steps,
    )

    def deliver_batch(images: list[Image.Image | None], batch: Batch) -> None:
        deliver(images, [items[i] for i in item_ids[batch.numbers]], batch.numbers)

    records: list[Any] = [None] * len(positions)  # of each sample, batch size 1
    with Decoder(policy, deliver_batch) as decoder:
        for batch, is_dummy in state.strategy.synced_batches(batches, batches[0], should_stop):
            numbers = batch.numbers
            draws = Draws(
                item_ids=item_ids[numbers],
                seeds=seeds[numbers].tolist(),
                height=batch.height,
                width=batch.width,
                initial_seeds=initial_seeds[numbers].tolist() if sample.same_latent else None,
            )
            rows = torch.from_numpy(row_of[numbers])
            record = rollout(policy, conditioning.select(rows), draws, sampling)
            if is_dummy:
                continue
            decoder.submit(record.clean_latents, batch)
            for place, number in enumerate(numbers):
                row = row_of[number]
                # Text features are kept once per item, not once per image.
                of_item = conditioning.select(slice(row, row + 1))
                of_sample = record.select(slice(place, place + 1))
                records[number] = dataclasses.replace(of_sample, conditioning=of_item)
    return Rollouts(samples.item_ids, positions, records, keys)
