"""Objectives: classes with the loss of one training step, named by ``config.train.loss_type``."""

from paco_grpo.objectives.base import (
    OBJECTIVES,
    Group,
    LossOutput,
    MicroBatch,
    Objective,
    Snapshot,
    Step,
    create_objective,
    get_objective,
    reference_kl,
)
from paco_grpo.sampling.denoise import transition

__all__ = [
    "OBJECTIVES",
    "Group",
    "LossOutput",
    "MicroBatch",
    "Objective",
    "Snapshot",
    "Step",
    "create_objective",
    "get_objective",
    "reference_kl",
    "transition",
]
