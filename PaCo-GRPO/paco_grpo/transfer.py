"""Copies from main memory to the accelerator for which the host does not wait."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` on ``device``; to CUDA by way of page-locked memory, behind what was launched there before.

    A plain copy makes the host wait until the GPU has done all that, so the GPU then waits for the next launch. For small
    tensors within a rollout; locked memory is kept by torch for the next one.
    """
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
