"""Batches of one size, and decoding in the background."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_policy import ToyPolicy

from paco_grpo.sampling.denoise import Draws, Sampling, rollout
from paco_grpo.sampling.images import Batch, Decoder, batches_by_key
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


@pytest.mark.parametrize("overlap", [False, True])
def test_images_are_decoded_in_order_and_errors_are_passed_on(overlap):
    policy, delivered = Decoding(), []

    def run(counts):
        records = []
        deliver = lambda images, batch: delivered.append((images, batch.numbers[0]))
        with Decoder(policy, deliver, overlap) as decoder:
            for number, count in enumerate(counts):
                items = [Item(number, "x")] * count
                draws = Draws(range(count), range(count), 8, 8)
                record = rollout(policy, policy.encode(items), draws, Sampling(2))
                decoder.submit(record.clean_latents, Batch([number], 8, 8))
                records.append(record)
        return records

    records = run([2, 3, 2])
    assert [number for _, number in delivered] == [0, 1, 2]
    for record, (images, _) in zip(records, delivered, strict=True):
        assert [value for value, _ in images] == record.clean_latents[:, 0, 0].tolist()
        names = {name for _, name in images}
        assert (names != {threading.current_thread().name}) == overlap
    for counts in ([2, 1, 2], [2, 1]):
        with pytest.raises(ValueError, match="VAE is gone"):
            run(counts)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_the_loop_is_not_hidden_by_one_of_the_thread(overlap):
    policy = Decoding()
    with pytest.raises(KeyError), Decoder(policy, lambda *_: 1 / 0, overlap) as decoder:
        if overlap:
            decoder.submit(torch.zeros(2, 4, 3), Batch([0], 8, 8))
        raise KeyError


def test_images_that_are_not_finite_are_none(caplog):
    latents = torch.zeros(3, 4, 3)
    latents[1, 2, 1] = float("inf")
    delivered = []
    with Decoder(Decoding(), lambda images, batch: delivered.extend(images)) as decoder:
        decoder.submit(latents, Batch([0, 1, 2], 8, 8))
    assert [image is None for image in delivered] == [False, True, False]
    assert "1 of 3 images" in caplog.text
