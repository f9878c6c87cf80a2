"""Objectives by name: each is ``(record, policy, config) -> (loss_sum, metrics)``.

``record`` is a micro-batch with ``advantages`` (B,) and ``weights`` (B,; 0 = left out) filled in. ``loss_sum`` is the
weighted *sum* over the samples of the mean over their trained steps: the trainer divides by the global number of kept
samples, so neither batch size nor number of processes changes the mathematics. ``metrics`` are weighted means over
the micro-batch (0-dim float32 tensors without gradient): average them with ``record.weights.sum()``.

Objectives recompute a step through ``paco_grpo.sampling.rollout.record_transition``, the function the rollout used.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paco_grpo.types import RolloutRecord

Objective = Callable[[RolloutRecord, Any, Any], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]

OBJECTIVES: dict[str, str] = {
    "ppo": "paco_grpo.objectives.ppo:ppo_loss",
    "guard_grpo": "paco_grpo.objectives.guard:guard_loss",
    "nft": "paco_grpo.objectives.nft:nft_loss",
}


def get_objective(name: str) -> Objective:
    """The objective called ``name`` (``config.train.loss_type``).

    Raises:
        ValueError: It is unknown; the message names the nearest right one and all others.
    """
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(str(name), OBJECTIVES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"config.train.loss_type = {name!r} is unknown: {hint}Known: {', '.join(OBJECTIVES)}")
    module, function = OBJECTIVES[name].split(":")
    return getattr(importlib.import_module(module), function)
