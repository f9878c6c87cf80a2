"""Objectives: each is a class with the loss of one training step (``base``), named by
``config.train.loss_type``.
"""

from paco_grpo.objectives.base import (
    OBJECTIVES,
    LossOutput,
    MicroBatch,
    Objective,
    Snapshot,
    Step,
    get_objective,
)

__all__ = [
    "OBJECTIVES",
    "LossOutput",
    "MicroBatch",
    "Objective",
    "Snapshot",
    "Step",
    "get_objective",
]
