"""The samples of an epoch: k repeats of m prompts, shuffled, with their seeds.

It depends on (seed, epoch) only: process r of P takes the positions r, r + P, r + 2P, … of one
global order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paco_grpo.types import Stream


@dataclass(frozen=True)
class EpochSamples:
    """The samples of one epoch over all processes, in their global order."""

    item_ids: np.ndarray  # (m·k,) int64, index into the items; groups are formed by it
    seeds: np.ndarray  # (m·k,) int64 ≥ 0, noise seed of each sample
    # (m·k,) int64 ≥ 0, ``latents`` values per item: seeds of the initial noise with ``same_latent``
    initial_seeds: np.ndarray

    def positions_of(self, process: int, num_processes: int) -> np.ndarray:
        """Positions (int64) in the global order of the samples of ``process``."""
        return np.arange(process, len(self.item_ids), num_processes)


class GroupSampler:
    """Samples m prompts per epoch, k images each, without replacement within a pass over the set.

    A data set with fewer than m items is repeated within an epoch (an item then has a multiple of k
    images). With several sets, each has its own m and its own passes, and its items follow those of
    the set before it. ``latents`` is ``sample.latents_per_prompt``, a divisor of k.
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
