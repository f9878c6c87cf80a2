"""Copies to the accelerator: the same numbers, and on a GPU no waiting."""

import pytest
import torch

from paco_grpo.types import to_device


def test_numbers_and_types_stay():
    for tensor in (torch.arange(6.0).view(2, 3), torch.tensor([1, 2]), torch.ones(3, dtype=torch.bfloat16)):
        there = to_device(tensor, "cpu")
        assert there.dtype == tensor.dtype and torch.equal(there, tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_host_does_not_wait():
    tensor, busy = torch.randn(1000), torch.randn(4096, 4096, device="cuda")
    to_device(tensor, "cuda")  # locked memory is made at the first copy
    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy * 1e-3
    there, done = to_device(tensor, "cuda"), torch.cuda.Event()
    done.record()
    assert not done.query(), "the products are still being computed"
    assert torch.equal(there.cpu(), tensor)
