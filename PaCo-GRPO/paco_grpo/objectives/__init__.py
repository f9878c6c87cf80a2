"""Losses: each is a function of one training step (``base``), named by ``config.train.loss_type``."""

from paco_grpo.objectives.base import (
    OBJECTIVES,
    LossOutput,
    Objective,
    Snapshot,
    Step,
    get_objective,
    objective,
)

__all__ = [
    "OBJECTIVES",
    "LossOutput",
    "Objective",
    "Snapshot",
    "Step",
    "get_objective",
    "objective",
]
