"""The sampling half of an epoch: choose prompts, encode, roll out in batches, decode, deliver.

``distributed.Shares`` says what the *position*, *process* and *number* of an image are.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from paco_grpo.distributed import Shares
from paco_grpo.objectives import Objective
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.sampling.images import Batch, at_size, batches_by_key, decode
from paco_grpo.training.state import TrainState, merges_lora
from paco_grpo.types import Conditioning, Item, NoiseStep, Rollout, Stream


@dataclass(frozen=True)
class EpochSamples:
    """The samples of one epoch over all processes, by position.

    They depend on (seed, epoch) only, not on the number of processes.
    """

    item_ids: np.ndarray  # (m·k,) int64, index into the items; groups are formed by it
    seeds: np.ndarray  # (m·k,) int64 ≥ 0, noise seed of each sample
    # (m·k,) int64 ≥ 0, ``latents`` values per item: seeds of the initial noise with ``same_latent``
    initial_seeds: np.ndarray


class GroupSampler:
    """Samples m prompts per epoch, k images each, without replacement within a pass over the set.

    A prompt set with fewer than m items is repeated within an epoch (an item then has a multiple of
    k images). With several sets, each has its own m and its own passes, and its items follow those
    of the set before it. ``latents`` is ``sample.latents_per_prompt``, a divisor of k.
    """

    def __init__(
        self,
        num_items: Sequence[int],
        prompts: Sequence[int],
        images_per_prompt: int,
        seed: int,
        latents: int = 1,
    ) -> None:
        """``num_items``, ``prompts``: of each prompt set."""
        self.num_items = list(num_items)
        self.prompts = list(prompts)
        self.images_per_prompt = images_per_prompt
        self.latents = latents
        self.seed = seed

    def samples(self, epoch: int) -> EpochSamples:
        """The samples of ``epoch``, the first being 0."""
        count = sum(self.prompts) * self.images_per_prompt
        order = self._generator(Stream.SAMPLE_ORDER, epoch).permutation(count)
        first = 0  # item of its set
        chosen = []
        for number, num_items in enumerate(self.num_items):
            chosen.append(first + self._choose(number, epoch))
            first += num_items
        item_ids = np.repeat(np.concatenate(chosen), self.images_per_prompt)[order]
        seeds = self._words(count, Stream.SAMPLE_SEEDS, epoch)
        words = self._words(self.latents * sum(self.num_items), Stream.INITIAL_SEEDS, epoch)
        by_latent_and_item = words.reshape(self.latents, -1)
        # ``order`` has k successive numbers for each item. As ``latents`` divides k, each initial
        # noise gets equally many of an item's images.
        initial_seeds = by_latent_and_item[order % self.latents, item_ids]
        return EpochSamples(item_ids, seeds, initial_seeds)

    def _choose(self, number: int, epoch: int) -> np.ndarray:
        """The prompts of set ``number`` in an epoch, counted from its first item."""
        num_items = self.num_items[number]
        prompts = self.prompts[number]
        further = [number] if number else []  # the first set has the prompts of an only one
        if num_items < prompts:
            rng = self._generator(Stream.PROMPTS, epoch, *further)
            passes = -(-prompts // num_items)
            orders = [rng.permutation(num_items) for _ in range(passes)]
            return np.concatenate(orders)[:prompts]
        epochs_per_pass = num_items // prompts
        number_of_pass, part = divmod(epoch, epochs_per_pass)
        rng = self._generator(Stream.PROMPTS, number_of_pass, *further)
        order = rng.permutation(num_items)
        return order[part * prompts : (part + 1) * prompts]

    def _generator(self, stream: Stream, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([stream, self.seed, *numbers])

    def _words(self, count: int, stream: Stream, epoch: int) -> np.ndarray:
        words = np.random.SeedSequence([stream, self.seed, epoch]).generate_state(count, np.uint64)
        return (words >> np.uint64(1)).astype(np.int64)


@dataclass
class Rollouts:
    """What one process sampled in an epoch: n = images of this process, N = of all."""

    item_ids: np.ndarray  # (N,) by position
    datasets: np.ndarray  # (N,) by position, numbers of their prompt sets
    shares: Shares
    # (n,) rollouts of batch size 1: views into the sampled batches and their item's conditioning.
    samples: list[Rollout]
    keys: list[Hashable]  # (n,) samples with equal keys may share a forward (``Policy.batch_key``)
    finite: np.ndarray  # (n,) bool; the others have no score, and zeros for their latents

    @property
    def positions(self) -> np.ndarray:
        """(n,) int64 by number."""
        return np.array(self.shares.positions)

    def batches_at(self, positions: np.ndarray, size: int) -> list[np.ndarray]:
        """Numbers of this process's samples among those at ``positions``, in their order.

        In micro-batches of one key, of at most ``size``.
        """
        numbers = []
        for position in positions.tolist():
            if self.shares.owner(position) == self.shares.process:
                numbers.append(self.shares.number_of(position))
        batches = batches_by_key([self.keys[number] for number in numbers], size)
        return [np.array(numbers)[batch] for batch in batches]

    def stack(self, numbers: Iterable[int]) -> Rollout:
        """The samples ``numbers``, of one key, as one rollout."""
        return Rollout.cat([self.samples[number] for number in numbers])


@dataclass
class Sampler:
    """One process's part in the sampling of an epoch."""

    state: TrainState
    groups: GroupSampler
    items: Sequence[Item]  # of all prompt sets
    options: RunOptions
    objective: Objective
    batch_size: int  # images per forward

    def load(self) -> dict[int, Item]:
        """This process's items of the current epoch by their ids: sized, with their images."""
        item_ids = self.groups.samples(self.state.epoch).item_ids
        shares = Shares.of(self.state.strategy.accelerator, len(item_ids))
        mine = item_ids[shares.positions]
        policy = self.state.policy
        options = self.options
        loaded = {}
        for item_id in np.unique(mine).tolist():
            item = self.items[item_id]
            loaded[item_id] = at_size(item, options.train.resolution, options.item_size, policy)
        return loaded

    def sample(
        self,
        deliver: Callable[[list[Image.Image | None], list[Item], list[int], Sequence[int]], None],
        should_stop: Callable[[], bool] | None = None,
        loaded: Mapping[int, Item] | None = None,
    ) -> Rollouts:
        """Sample this process's share of the current epoch.

        Args:
            deliver: Gets the images of each batch, their items, their numbers and the seeds of
                their noise.
            should_stop: Asked before each batch; then ``Stopped`` is raised on every process.
            loaded: What ``load`` returns.
        """
        state = self.state
        items = self.items
        options = self.options
        sample = options.sample
        policy = state.policy

        # The n samples of this process: which item each is of, and the seeds of its noise.
        epoch_samples = self.groups.samples(state.epoch)
        shares = Shares.of(state.strategy.accelerator, len(epoch_samples.item_ids))
        positions = shares.positions
        item_ids = epoch_samples.item_ids[positions]
        seeds = epoch_samples.seeds[positions]
        initial_seeds = epoch_samples.initial_seeds[positions]

        # Each item is encoded once, however many images it gets, on every process that has one of
        # them: dividing this would save about 1 % of an epoch's FLOPs.
        item_at_size = self.load() if loaded is None else loaded
        sized = list(item_at_size.values())
        encoded = policy.encode(sized, options.train.max_sequence_length)
        conditioning_of = dict(zip(item_at_size, encoded.split(), strict=True))

        # Samples of one size share a forward.
        keys = [policy.batch_key(item_at_size[i]) for i in item_ids.tolist()]
        batches = []
        for numbers in batches_by_key(keys, self.batch_size):
            first = item_at_size[item_ids[numbers[0]]]
            batches.append(Batch(numbers, *first.size))

        sampling = Sampling(
            num_steps=sample.num_steps,
            noise_steps=self._noise_steps(),
            noise_level=sample.noise_level,
            transition=sample.transition,
            merge_lora=merges_lora(options, policy.device),
            tail_steps=sample.tail_steps,
        )

        samples: dict[int, Rollout] = {}  # rollouts of batch size 1, by number
        finite = np.ones(len(positions), bool)
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
            images = decode(policy, record.clean_latents, batch)
            deliver(images, [items[i] for i in ids], numbers, draws.seeds)
            finite[numbers] = [image is not None for image in images]
            for number, item_id, part in zip(numbers, ids, record.split(), strict=True):
                if not finite[number]:
                    part = with_zeros(part)  # which can be a dummy: 0 · NaN is NaN
                # Text features are kept once per item, not once per image.
                samples[number] = dataclasses.replace(part, conditioning=conditioning_of[item_id])
        in_order = [samples[number] for number in range(len(item_ids))]
        datasets = np.array([items[i].dataset for i in epoch_samples.item_ids])
        return Rollouts(epoch_samples.item_ids, datasets, shares, in_order, keys, finite)

    def _noise_steps(self) -> list[int]:
        """The noise steps of the current epoch, ascending.

        Raises ConfigError: They are not in the schedule, or there is none to train.
        """
        epoch = self.state.epoch
        steps = sorted(set(self.objective.noise_steps(epoch)))
        last = self.options.sample.num_steps - 1
        is_in_schedule = all(0 <= step <= last for step in steps)
        lacks_one = self.objective.needs_noise_steps and not steps
        if lacks_one or not is_in_schedule:
            raise ConfigError(
                f"config.train.loss_type={self.options.train.loss_type!r}: noise_steps({epoch}) "
                f"returns {steps}; it must return some of the steps 0 to {last}"
            )
        return steps


def with_zeros(rollout: Rollout) -> Rollout:
    """``rollout`` with zeros for its latents and log-probabilities."""
    steps = []
    for step in rollout.noise_steps:
        latents = torch.zeros_like(step.latents)
        log_prob = torch.zeros_like(step.log_prob)
        steps.append(NoiseStep(step.index, latents, latents, latents, log_prob))
    clean_latents = torch.zeros_like(rollout.clean_latents)
    return dataclasses.replace(rollout, clean_latents=clean_latents, noise_steps=steps)
