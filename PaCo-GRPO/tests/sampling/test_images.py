"""Sizes, and batches of one size."""

from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.sampling.images import (
    batches_by_key,
    item_size,
    round_to_multiple,
)
from paco_grpo.types import Item


@given(
    st.integers(1, 4000), st.integers(1, 4000), st.integers(16, 2048), st.sampled_from([8, 16, 32])
)
def test_aspect_keeps_shape_and_area(height, width, resolution, multiple):
    item = Item(0, "x", height, width)
    assert item_size(item, resolution, "exact") == (height, width)
    assert item_size(Item(1, "x"), resolution, "aspect") == (resolution, resolution)
    size = item_size(item, resolution, "aspect")
    rounded = round_to_multiple(size, multiple)
    assert all(side % multiple == 0 and side >= multiple for side in rounded)
    assert all(
        abs(a - b) <= max(multiple / 2, multiple - min(size))
        for a, b in zip(rounded, size, strict=True)
    )
    assert abs(size[0] * width - size[1] * height) <= max(height, width)  # rounded to whole pixels
    assert abs(size[0] * size[1] - resolution**2) <= sum(size) / 2 + 1


@given(st.lists(st.sampled_from([(8, 8), (8, 16), (16, 16)]), max_size=30), st.integers(1, 7))
def test_batches_hold_one_size_each_and_are_as_few_as_possible(sizes, batch_size):
    batches = batches_by_key(sizes, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert all(
        0 < len(batch) <= batch_size and len({sizes[i] for i in batch}) == 1 for batch in batches
    )
    assert len(batches) == sum(-(-sizes.count(size) // batch_size) for size in set(sizes))
