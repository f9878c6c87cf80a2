"""Objectives: classes with the loss of one training step, named by ``config.train.loss_type``."""

import inspect
from collections.abc import Callable
from typing import Any

from paco_grpo.names import find_function
from paco_grpo.objectives.base import (
    LossOutput,
    MicroBatch,
    Objective,
    Snapshot,
    Step,
    reference_kl,
)
from paco_grpo.options import TrainOptions
from paco_grpo.policies import Policy
from paco_grpo.sampling.denoise import transition

__all__ = [
    "OBJECTIVES",
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

OBJECTIVES: dict[str, str] = {
    "ppo": "paco_grpo.objectives.ppo:Ppo",
    "guard_grpo": "paco_grpo.objectives.guard:GuardGrpo",
    "nft": "paco_grpo.objectives.nft:Nft",
    "flow_dppo": "paco_grpo.objectives.flow_dppo:FlowDppo",
    "awm": "paco_grpo.objectives.awm:Awm",
    "dgpo": "paco_grpo.objectives.dgpo:Dgpo",
}


def get_objective(name: str) -> type[Objective]:
    """The class of the objective called ``name``, or of ``package.module:name``.

    That may also be a function (step, policy, ``options.train``, …) → ``LossOutput``, which becomes
    the ``loss`` of a class with the default attributes.

    Raises:
        ValueError: The name is unknown, or cannot be imported.
    """
    try:
        imported = find_function(OBJECTIVES.get(name, name), list(OBJECTIVES))
    except ValueError as error:
        raise ValueError(f"config.train.loss_type={error}") from error
    if isinstance(imported, type) and issubclass(imported, Objective):
        return imported
    return _objective_of(imported)


def create_objective(train: TrainOptions) -> Objective:
    """The objective ``train.loss_type`` with the arguments ``train.loss_kwargs``.

    Raises:
        ValueError: There is none of this name, or it takes other arguments.
    """
    objective_class = get_objective(train.loss_type)
    try:
        return objective_class(train, **train.loss_kwargs)
    except TypeError as error:
        raise ValueError(f"config.train.loss_kwargs={train.loss_kwargs}: {error}") from error


def _objective_of(function: Callable[..., LossOutput]) -> type[Objective]:
    class FunctionObjective(Objective):
        def __init__(self, train: TrainOptions, **arguments: Any) -> None:
            super().__init__(train)
            inspect.signature(function).bind("step", "policy", train, **arguments)
            self.arguments = arguments

        def loss(self, step: Step, policy: Policy) -> LossOutput:
            return function(step, policy, self.train, **self.arguments)

    return FunctionObjective
