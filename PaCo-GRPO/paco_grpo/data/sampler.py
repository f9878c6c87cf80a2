"""The samples of an epoch: k repeats of m prompts, shuffled, with their seeds.

It depends on (seed, epoch) only: process r of P takes the positions r, r + P, r + 2P, … of one
global order.
"""

from dataclasses import dataclass

import numpy as np

from paco_grpo.types import Stream


@dataclass(frozen=True)
class EpochSamples:
    """The samples of one epoch over all processes, in their global order."""

    item_ids: np.ndarray  # (m·k,) int64, index into the prompt set; groups are formed by it
    seeds: np.ndarray  # (m·k,) int64 ≥ 0, noise seed of each sample
    # (m·k,) int64 ≥ 0, ``latents`` values per item: seeds of the initial noise with ``same_latent``
    initial_seeds: np.ndarray

    def positions_of(self, process: int, num_processes: int) -> np.ndarray:
        """Positions (int64) in the global order of the samples of ``process``."""
        return np.arange(process, len(self.item_ids), num_processes)


class GroupSampler:
    """Samples m prompts per epoch, k images each, without replacement within a pass over the set.

    A data set with fewer than m items is repeated within an epoch (an item then has a multiple of k
    images). ``latents`` is ``sample.latents_per_prompt``, a divisor of k.
    """

    def __init__(
        self, num_items: int, prompts: int, images_per_prompt: int, seed: int, latents: int = 1
    ) -> None:
        self.num_items = num_items
        self.prompts = prompts
        self.images_per_prompt = images_per_prompt
        self.latents = latents
        self.seed = seed

    def samples(self, epoch: int) -> EpochSamples:
        """The samples of ``epoch``, the first being 0."""
        count = self.prompts * self.images_per_prompt
        order = self._generator(Stream.SAMPLE_ORDER, epoch).permutation(count)
        item_ids = np.repeat(self._choose(epoch), self.images_per_prompt)[order]
        seeds = self._words(count, Stream.SAMPLE_SEEDS, epoch)
        words = self._words(self.latents * self.num_items, Stream.INITIAL_SEEDS, epoch)
        by_latent_and_item = words.reshape(self.latents, -1)
        initial_seeds = by_latent_and_item[order % self.latents, item_ids]
        return EpochSamples(item_ids, seeds, initial_seeds)

    def _choose(self, epoch: int) -> np.ndarray:
        if self.num_items < self.prompts:
            rng = self._generator(Stream.PROMPTS, epoch)
            passes = -(-self.prompts // self.num_items)
            orders = [rng.permutation(self.num_items) for _ in range(passes)]
            return np.concatenate(orders)[: self.prompts]
        epochs_per_pass = self.num_items // self.prompts
        number_of_pass, part = divmod(epoch, epochs_per_pass)
        order = self._generator(Stream.PROMPTS, number_of_pass).permutation(self.num_items)
        return order[part * self.prompts : (part + 1) * self.prompts]

    def _generator(self, stream: Stream, number: int) -> np.random.Generator:
        return np.random.default_rng([stream, self.seed, number])

    def _words(self, count: int, stream: Stream, epoch: int) -> np.ndarray:
        words = np.random.SeedSequence([stream, self.seed, epoch]).generate_state(count, np.uint64)
        return (words >> np.uint64(1)).astype(np.int64)
