"""k repeats of m prompts: complete, shuffled, reproducible."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.data.sampler import GroupSampler

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
    samples = GroupSampler(items, m, k, seed, latents).samples(epoch)
    ids, counts = np.unique(samples.item_ids, return_counts=True)
    assert len(samples.item_ids) == m * k and len(ids) == min(items, m) and (counts % k == 0).all()
    assert ids.min() >= 0 and ids.max() < items
    assert len(np.unique(samples.seeds)) == m * k and (samples.seeds >= 0).all()
    for item in ids:
        counts = np.unique(samples.initial_seeds[samples.item_ids == item], return_counts=True)[1]
        assert len(counts) == latents and (counts == counts[0]).all()
    assert len(np.unique(samples.initial_seeds)) == len(ids) * latents


@given(items=st.integers(2, 30), m=st.integers(1, 10), seed=st.integers(0, 99))
def test_a_pass_does_not_repeat_a_prompt(items, m, seed):
    sampler = GroupSampler(items, m, 2, seed)
    seen = [i for epoch in range(items // m) for i in set(sampler.samples(epoch).item_ids.tolist())]
    assert len(seen) == len(set(seen))


def test_epochs_differ_and_are_reproducible():
    one, two, other = (GroupSampler(50, 5, 4, seed) for seed in (3, 3, 4))
    here = one.samples(7)
    assert np.array_equal(here.item_ids, two.samples(7).item_ids) and np.array_equal(
        here.seeds, two.samples(7).seeds
    )
    assert not any(
        np.array_equal(here.seeds, others.seeds) for others in (one.samples(8), other.samples(7))
    )
    assert not np.array_equal(here.item_ids, np.sort(here.item_ids))


def test_the_order_of_the_samples_changes_with_the_epoch():
    """Whichever prompts an epoch has: which samples belong together is compared."""
    orders = set()
    for epoch in range(5):
        item_ids = GroupSampler(9, 3, 4, seed=1).samples(epoch).item_ids.tolist()
        orders.add(tuple(item_ids.index(item_id) for item_id in item_ids))
    assert len(orders) == 5
