"""k repeats of m prompts: complete, shuffled, reproducible."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.training.sample import GroupSampler

SMALL = st.integers(1, 12)


@given(
    items=SMALL,
    m=SMALL,
    share=SMALL,
    latents=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 50),
)
def test_each_prompt_has_its_images_and_each_initial_noise_its_share(
    items, m, share, latents, seed, epoch
):
    k = share * latents
    samples = GroupSampler([items], [m], k, seed, latents).samples(epoch)
    ids, counts = np.unique(samples.item_ids, return_counts=True)
    assert len(samples.item_ids) == m * k and len(ids) == min(items, m) and (counts % k == 0).all()
    assert ids.min() >= 0 and ids.max() < items
    assert len(np.unique(samples.seeds)) == m * k and (samples.seeds >= 0).all()
    for item in ids:
        counts = np.unique(samples.initial_seeds[samples.item_ids == item], return_counts=True)[1]
        assert len(counts) == latents and (counts == counts[0]).all()
    assert len(np.unique(samples.initial_seeds)) == len(ids) * latents


def test_a_pass_repeats_no_prompt_and_the_next_one_mixes_them_anew():
    sampler = GroupSampler([22], [5], 2, seed=3)
    epochs = [set(sampler.samples(epoch).item_ids) for epoch in range(8)]
    assert len(set.union(*epochs[:4])) == len(set.union(*epochs[4:])) == 20
    assert not any(epoch in epochs[:4] for epoch in epochs[4:])
    small = GroupSampler([6], [8], 1, seed=3)  # of which an epoch repeats some
    counts = [tuple(np.bincount(small.samples(epoch).item_ids)) for epoch in range(8)]
    assert len(set(counts)) > 4


def test_epochs_differ_and_are_reproducible():
    first = GroupSampler([5], [5], 4, seed=3)
    again = GroupSampler([5], [5], 4, seed=3).samples(7)
    other = GroupSampler([5], [5], 4, seed=4).samples(7)
    here = first.samples(7)
    for name in ("item_ids", "seeds", "initial_seeds"):
        values = getattr(here, name)
        assert np.array_equal(values, getattr(again, name))
        assert not np.array_equal(values, getattr(first.samples(8), name)), name
        assert not np.array_equal(values, getattr(other, name)), name
    # Where an item's images stand differs, too, and not only which item is where.
    orders = []
    for samples in (here, first.samples(8), other):
        groups = [tuple(np.flatnonzero(samples.item_ids == item)) for item in range(5)]
        orders.append(sorted(groups))
    assert orders[0] != orders[1] and orders[0] != orders[2]
