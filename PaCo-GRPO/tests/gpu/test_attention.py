"""Kernels of attention by compute capability: 8.9 (RTX 4090), 9.0 (H100), 10.0 (B200)."""

from pathlib import Path

import pytest
from fake_gpu import run

FUSED = ["scaled_dot_product_efficient_attention", "scaled_dot_product_flash_attention"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_a_run_does_not_take_cudnns_attention(tmp_path, capability):
    """Its backward returns NaN for some masked inputs; PyTorch's default takes it from 9.0 on."""
    program = Path(__file__).with_name("attention.py")
    (kernels,) = run(tmp_path, program, FAKE_CAPABILITY=capability)
    assert kernels["run"] == FUSED
    assert (kernels["default"] == FUSED) == (capability < 90)
