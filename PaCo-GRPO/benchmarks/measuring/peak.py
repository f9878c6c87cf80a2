"""The matrix-product peak of this machine, measured: what a share of the peak (MFU) is a share of."""

from __future__ import annotations

import time
from typing import Any

import torch

_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}


def synchronise(device: torch.device) -> None:
    """Wait until ``device`` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> dict[str, Any]:
    """FLOP/s of ``torch.matmul`` on large square matrices: the best of sizes and of repeats.

    Args:
        device: With its present number of threads, and TF32 as it is set.
        dtype: Of both matrices and of the product.
        seconds: Spent on each size, at least three products.
    """
    by_size = {}
    for size in _SIZES[device.type]:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        torch.matmul(a, b, out=out)
        synchronise(device)
        best, begun, rounds = float("inf"), time.perf_counter(), 0
        while rounds < 3 or time.perf_counter() - begun < seconds:
            started = time.perf_counter()
            torch.matmul(a, b, out=out)
            synchronise(device)
            best, rounds = min(best, time.perf_counter() - started), rounds + 1
        by_size[str(size)] = 2 * size**3 / best
    return {
        "flops_per_second": max(by_size.values()), "by_size": by_size, "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }  # fmt: skip
