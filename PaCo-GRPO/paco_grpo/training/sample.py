"""The sampling half of an epoch: encode, roll out in batches, decode, and deliver the images.

Images are counted in three ways. Three images of two prompts on two processes:

    position   item id   process   number
    0          7         0         0
    1          4         1         0
    2          7         0         1

The *item id* says which prompt of the data set an image is of; the images of one item are a group.
The *position* is the image's place in the epoch over all processes, the *number* that among the
images of its process: number i of process r of P has the position r + i·P.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from paco_grpo.options import RunOptions
from paco_grpo.sampling.denoise import Draws, Sampling, rollout, sample_noise_steps
from paco_grpo.sampling.images import Batch, at_size, batches_by_key, decode
from paco_grpo.training.state import Plan, TrainState, merges_lora
from paco_grpo.types import Conditioning, Item, Rollout


@dataclass
class Rollouts:
    """What one process sampled in an epoch of n images a process, N in all."""

    item_ids: np.ndarray  # (N,) by position
    positions: np.ndarray  # (n,) by number
    # (n,) rollouts of batch size 1: views into the sampled batches and their item's conditioning.
    samples: list[Rollout]
    keys: list[Hashable]  # (n,) samples with equal keys may share a forward (``Policy.batch_key``)

    def numbers_at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers of this process's samples among those at ``positions``, in their order."""
        number_of = {position: number for number, position in enumerate(self.positions.tolist())}
        local = [number_of[position] for position in positions.tolist() if position in number_of]
        return np.array(local, np.int64)

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

    ``deliver`` gets the images of each batch, their items and their numbers. ``should_stop`` is
    asked before each batch, and then ``Stopped`` is raised on every process.
    """
    sample = options.sample
    policy = state.policy
    accelerator = state.strategy.accelerator

    # The n samples of this process: which item each is of, and the seeds of its noise.
    epoch_samples = state.sampler.samples(state.epoch)
    positions = epoch_samples.positions_of(accelerator.process_index, accelerator.num_processes)
    item_ids = epoch_samples.item_ids[positions]
    seeds = epoch_samples.seeds[positions]
    initial_seeds = epoch_samples.initial_seeds[positions]

    # Each item is encoded once, however many images it gets, on every process that has one of them:
    # dividing this would save about 1 % of an epoch's FLOPs.
    unique_ids = np.unique(item_ids).tolist()
    resolution = options.train.resolution
    sized = [at_size(items[i], resolution, options.item_size, policy) for i in unique_ids]
    item_at_size = dict(zip(unique_ids, sized, strict=True))
    encoded = policy.encode(sized, options.train.max_sequence_length)
    conditioning_of = dict(zip(unique_ids, encoded.split(), strict=True))

    # Samples of one size share a forward.
    keys = [policy.batch_key(item_at_size[i]) for i in item_ids.tolist()]
    batches = []
    for numbers in batches_by_key(keys, plan.sample_batch_size):
        first = item_at_size[item_ids[numbers[0]]]
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

    samples: list[Any] = [None] * len(positions)  # rollouts of batch size 1, by number
    for batch, is_dummy in state.strategy.synced_batches(batches, batches[0], should_stop):
        numbers = batch.numbers
        ids = item_ids[numbers].tolist()
        draws = Draws(
            item_ids=ids,
            seeds=seeds[numbers].tolist(),
            height=batch.height,
            width=batch.width,
            initial_seeds=initial_seeds[numbers].tolist() if sample.same_latent else None,
        )
        conditioning = Conditioning.cat([conditioning_of[i] for i in ids])
        record = rollout(policy, conditioning, draws, sampling)
        if is_dummy:
            continue
        deliver(decode(policy, record.clean_latents, batch), [items[i] for i in ids], numbers)
        for number, item_id, part in zip(numbers, ids, record.split(), strict=True):
            # Text features are kept once per item, not once per image.
            samples[number] = dataclasses.replace(part, conditioning=conditioning_of[item_id])
    return Rollouts(epoch_samples.item_ids, positions, samples, keys)
