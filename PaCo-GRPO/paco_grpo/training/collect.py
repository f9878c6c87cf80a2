"""The sampling half of an epoch: encode, roll out in batches, decode, hand over to the rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from paco_grpo.data import prompts
from paco_grpo.data.sampler import EpochSamples
from paco_grpo.policies.base import Policy
from paco_grpo.sampling.rollout import rollout
from paco_grpo.training.decoding import Decoder
from paco_grpo.training.scoring import ScoringQueue
from paco_grpo.types import Conditioning, Item, RolloutRecord


@dataclass
class ItemRows(Conditioning):
    """Stands in a stored record for its conditioning: text features are kept once per item, not once per image."""

    rows: torch.Tensor  # (B,) int64, row of each sample in the epoch's conditioning


@dataclass
class Rollouts:
    """What one process sampled in an epoch. Local sample i has global position ``positions[i]``."""

    conditioning: Conditioning  # one row per unique item
    records: list[RolloutRecord]  # conditioning = ItemRows
    keys: list[Hashable]  # per record: records of one key may share a forward (Policy.batch_key)
    samples: list[np.ndarray]  # per record: local sample numbers of its rows

    def micro_batches(self, wanted: Sequence[int], size: int) -> Iterator[tuple[np.ndarray, RolloutRecord]]:
        """Local samples ``wanted`` in the given order, as (local sample numbers, record) of at most ``size``."""
        for numbers in self.batches(wanted, size):
            yield numbers, self.record(numbers)

    def batches(self, wanted: Sequence[int], size: int) -> list[np.ndarray]:
        """The local sample numbers of each of the ``micro_batches``.

        A micro-batch has one image size (and size of reference): other samples are gathered beside it, order kept
        within each.
        """
        keys = [self.keys[self._place[int(sample)][0]] for sample in wanted]
        return [np.asarray(wanted)[batch] for batch in batches_by_key(keys, size)]

    def record(self, numbers: Sequence[int]) -> RolloutRecord:
        """Local samples ``numbers``, of one image size, as one record with its conditioning."""
        return self._join([self._place[int(sample)] for sample in numbers])

    @cached_property
    def _place(self) -> dict[int, tuple[int, int]]:
        """Local sample → (record, row in it)."""
        return {int(s): (r, row) for r, group in enumerate(self.samples) for row, s in enumerate(group)}

    def _join(self, places: list[tuple[int, int]]) -> RolloutRecord:
        # Runs of neighbours out of one record are taken in one go; a batch mostly comes from few records.
        order = sorted(range(len(places)), key=lambda i: places[i])
        parts = []
        for number in sorted({record for record, _ in places}):
            parts.append(self.records[number].select([row for record, row in sorted(places) if record == number]))
        joined = RolloutRecord.cat(parts).select(list(np.argsort(order)))
        return dataclasses.replace(joined, conditioning=self.conditioning.select(joined.conditioning.rows))


def size_of(item: Item, resolution: int, mode: str, policy: Policy) -> tuple[int, int]:
    """Pixels at which ``item`` is drawn, as the model can draw it; an edit without a size has its image's shape."""
    if policy.edits_images and (mode == "aspect" or item.height is None):
        return policy.size_like(item, resolution)
    size = prompts.item_size(item, resolution, mode)
    return policy.round_size(*size) if mode == "exact" else prompts.round_to_multiple(size, policy.size_multiple)


def at_size(item: Item, resolution: int, mode: str, policy: Policy) -> Item:
    """``item`` with the size at which it is drawn, as ``Policy.encode`` and ``batch_key`` want it, and its image read."""
    held = dataclasses.replace(item)
    height, width = size_of(held, resolution, mode, policy)
    return dataclasses.replace(held, height=height, width=width)


def batches_by_key(keys: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Indices into ``keys`` in batches of equal key, keys in order of first appearance."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]


def collect(
    policy: Policy,
    items: Sequence[Item],
    samples: EpochSamples,
    positions: np.ndarray,
    queue: ScoringQueue,
    *,
    resolution: int,
    item_size: str,
    batch_size: int,
    same_latent: bool,
    on_images: Callable[[list], None],
    stop_after_batch: Callable[[], bool],
    overlap_decode: bool = False,
    turns: Callable[[int], int] = lambda own: own,
    **sampling: Any,
) -> Rollouts | None:
    """Sample this process's share of an epoch; scores arrive in ``queue`` while sampling goes on.

    Args:
        policy: With the weights to sample from.
        items: The prompt set.
        samples: The epoch over all processes.
        positions: Global positions of this process's samples; local sample i is ``positions[i]``.
        queue: Receives images; row i of its result is local sample i.
        resolution: See ``size_of``.
        item_size: See ``size_of``.
        batch_size: Images per forward.
        same_latent: One initial noise per prompt; the steps before the first noise step are then shared.
        on_images: Called with the images of each batch, in order; in another thread where decoding overlaps.
        stop_after_batch: Asked after each batch; True = stop here.
        overlap_decode: Decode a batch while the next one is sampled (``decoding.Decoder``).
        turns: ``Engine.turns``; in the turns beyond its own batches, this process draws one again and drops it.
        sampling: ``num_steps``, ``noise_steps``, ``noise_level``, ``cps``, ``merge_lora`` and ``tail`` of ``rollout``.

    Returns:
        None when ``stop_after_batch`` asked to stop.
    """

    def deliver(images: list, batch: list[int]) -> None:
        queue.submit(images, [items[i] for i in item_ids[batch]], batch)
        on_images(images)

    item_ids = samples.item_ids[positions]
    unique, rows = np.unique(item_ids, return_inverse=True)
    drawn = [at_size(items[i], resolution, item_size, policy) for i in unique]
    conditioning = policy.encode(drawn)
    keys = [policy.batch_key(item) for item in drawn]
    records, record_keys, numbers = [], [], []
    batches = batches_by_key([keys[row] for row in rows], batch_size)
    with Decoder(policy, deliver, overlap_decode) as decoder:
        for turn in range(turns(len(batches))):
            idle = turn >= len(batches)
            batch = batches[0 if idle else turn]
            height, width = drawn[rows[batch[0]]].height, drawn[rows[batch[0]]].width
            batch_rows = torch.from_numpy(rows[batch])
            record = rollout(
                policy,
                conditioning.select(batch_rows),
                item_ids[batch],
                samples.seeds[positions[batch]].tolist(),
                height,
                width,
                group_index=batch_rows if same_latent else None,
                initial_seeds=samples.group_seeds[positions[batch]].tolist() if same_latent else None,
                **sampling,
            )
            if not idle:
                decoder.submit(record.clean_latents, height, width, batch)
                rows_only = ItemRows(batch_rows.to(record.item_ids.device))
                records.append(dataclasses.replace(record, conditioning=rows_only))
                record_keys.append(keys[rows[batch[0]]])
                numbers.append(np.array(batch))
            if stop_after_batch():
                return None
        decoder.wait()
    return Rollouts(conditioning, records, record_keys, numbers)
