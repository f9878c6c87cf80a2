"""Batches of one size, and decoding in the background."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import ToyPolicy

from paco_grpo.sampling.denoise import Sampling
from paco_grpo.sampling.images import Batch, batches_by_key, sample_images
from paco_grpo.types import Item


@given(st.lists(st.sampled_from([(8, 8), (8, 16), (16, 16)]), max_size=30), st.integers(1, 7))
def test_batches_hold_one_size_each_and_are_as_few_as_possible(sizes, batch_size):
    batches = batches_by_key(sizes, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert all(
        0 < len(batch) <= batch_size and len({sizes[i] for i in batch}) == 1 for batch in batches
    )
    assert len(batches) == sum(-(-sizes.count(size) // batch_size) for size in set(sizes))


class Decoding(ToyPolicy):
    """Its images are the first latents, with the thread that decoded them."""

    def decode(self, latents, height, width):
        if len(latents) == 1:
            raise ValueError("the VAE is gone")
        return [(float(x), threading.current_thread().name) for x in latents[:, 0, 0]]


@pytest.mark.parametrize("background", [False, True])
def test_images_are_decoded_in_order_and_errors_are_passed_on(background):
    policy, got = Decoding(), []

    def run(counts, dummies=()):
        def inputs(batch):
            items = [Item(batch.numbers[0], "x")] * counts[batch.numbers[0]]
            return {
                "conditioning": policy.encode(items),
                "item_ids": range(len(items)),
                "seeds": range(len(items)),
            }

        batches = [(Batch([number], 8, 8), number in dummies) for number in range(len(counts))]
        deliver = lambda images, batch: got.append((images, batch.numbers[0]))
        return list(sample_images(policy, batches, inputs, deliver, Sampling(2), background))

    results = run([2, 2, 3, 2], dummies={1})
    assert [batch.numbers[0] for batch, _ in results] == [number for _, number in got] == [0, 2, 3]
    for (_, result), (images, _) in zip(results, got, strict=True):
        assert [value for value, _ in images] == result.clean_latents[:, 0, 0].tolist()
        assert all((name != threading.current_thread().name) == background for _, name in images)
    for counts in ([2, 1, 2], [2, 1]):
        with pytest.raises(ValueError, match="VAE is gone"):
            run(counts)
