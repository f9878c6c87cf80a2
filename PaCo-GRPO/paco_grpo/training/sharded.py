"""Tensors that may be divided over processes (DTensor): the whole out of the parts, and parts out of a whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one plain tensor without gradient; where it is divided, every process must call this."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``value``, the same whole tensor on every process, divided and placed as ``target`` is; no communication."""
    value = value.to(target.device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def save_transformer(transformer: nn.Module, folder: Path, write: bool) -> None:
    """Write ``transformer`` as diffusers reads it, also where it is divided over processes.

    Args:
        transformer: A diffusers model.
        folder: To write to.
        write: False: this process only takes part; all call it.
    """
    if not isinstance(transformer, FSDPModule):
        if write:
            transformer.save_pretrained(folder)
        return
    weights = {}
    for name, tensor in transformer.state_dict().items():
        value = whole(tensor)
        if write:
            weights[name] = value.cpu()
    if not write:
        return
    # fully_shard has put a class of its own before the model's; what is written is a copy of the model's.
    (model_class,) = (base for base in type(transformer).__bases__ if base is not FSDPModule)
    with torch.device("meta"):
        copy = model_class.from_config(transformer.config)
    copy.load_state_dict(weights, assign=True)
    copy.save_pretrained(folder)
