"""Losses: each is a function of one training step (``base``), named by ``config.train.loss_type``."""

from paco_grpo.objectives.base import OBJECTIVES, Objective, Snapshot, Step, Terms, get_objective, objective

__all__ = ["OBJECTIVES", "Objective", "Snapshot", "Step", "Terms", "get_objective", "objective"]
