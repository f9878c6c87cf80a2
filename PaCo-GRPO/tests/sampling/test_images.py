"""Batches of one size, and decoding in the background."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paco_grpo.sampling.images import Batch, Decoder, batches_by_key


@given(st.lists(st.sampled_from([(8, 8), (8, 16), (16, 16)]), max_size=30), st.integers(1, 7))
def test_batches_hold_one_size_each_and_are_as_few_as_possible(sizes, batch_size):
    batches = batches_by_key(sizes, batch_size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert all(0 < len(batch) <= batch_size and len({sizes[i] for i in batch}) == 1 for batch in batches)
    assert len(batches) == sum(-(-sizes.count(size) // batch_size) for size in set(sizes))


class Decoding:
    """A policy that only decodes."""

    device = torch.device("cpu")

    def __init__(self):
        self.threads = []

    def decode(self, latents, height, width):
        self.threads.append(threading.current_thread().name)
        if latents[0, 0, 0] < 0:
            raise ValueError("the VAE is gone")
        return [float(x) for x in latents[:, 0, 0]]


@pytest.mark.parametrize("background", [False, True])
def test_decoder_keeps_order_and_passes_errors_on(background):
    policy, got = Decoding(), []
    with Decoder(policy, lambda images, batch: got.append((images, batch.numbers[0])), background) as decoder:
        for mark in range(5):
            decoder.submit(torch.full((2, 1, 1), float(mark)), Batch([mark], 8, 8))
        decoder.wait()
    assert got == [([float(mark)] * 2, mark) for mark in range(5)]
    assert all(name.startswith("decode") == background for name in policy.threads)
    with pytest.raises(ValueError, match="VAE is gone"), Decoder(policy, print, background) as decoder:
        decoder.submit(torch.full((1, 1, 1), -1.0), Batch([0], 8, 8))
        decoder.wait()
