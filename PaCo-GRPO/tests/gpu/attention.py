"""Which kernels PyTorch chooses for attention, before and after a run sets it up."""

from unittest.mock import Mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from paco_grpo.options import RunOptions
from paco_grpo.policies.loading import apply_speed


class Kernels(TorchDispatchMode):
    """The names of the attention operators inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.__name__:
            self.names.add(func.__name__.split(".")[0].strip("_"))
        return func(*args, **kwargs or {})


def chosen() -> list[str]:
    """For inputs with and without a mask and a gradient."""
    kernels = Kernels()
    on = {"device": "cuda"}
    with FakeTensorMode():
        for length in (1536, 1216):
            mask = torch.ones(2, 1, 1, length, dtype=torch.bool, **on)
            for needs_grad in (False, True):
                query = torch.empty(2, 24, length, 128, dtype=torch.bfloat16, **on)
                query.requires_grad_(needs_grad)
                for attn_mask in (None, mask):
                    with kernels:
                        scaled_dot_product_attention(query, query, query, attn_mask=attn_mask)
    return sorted(kernels.names)


def main() -> dict[str, list[str]]:
    """Before and after."""
    before = chosen()
    apply_speed(RunOptions(), Mock())
    return {"default": before, "run": chosen()}
