"""Objectives by name (``config.train.loss_type``); an import path ``package.module:name`` names a user's own."""

from __future__ import annotations

import importlib

from paco_grpo.objectives.base import Objective, Snapshot, Step, Terms, objective
from paco_grpo.options.suggest import suggest

__all__ = ["OBJECTIVES", "Objective", "Snapshot", "Step", "Terms", "get_objective", "objective"]

OBJECTIVES: dict[str, str] = {
    "ppo": "paco_grpo.objectives.ppo:ppo",
    "guard_grpo": "paco_grpo.objectives.guard:guard_grpo",
    "nft": "paco_grpo.objectives.nft:nft",
}


def get_objective(name: str) -> Objective:
    """The objective called ``name``; a plain function is an objective that needs nothing special.

    Raises:
        ValueError: It is unknown or cannot be imported.
    """
    target = OBJECTIVES.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        near = suggest(name, OBJECTIVES)
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(
            f"config.train.loss_type={name!r} is unknown: {hint}Known: {', '.join(OBJECTIVES)}, or package.module:name"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"config.train.loss_type={name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"config.train.loss_type={name!r} is a {type(found).__name__}, not a function")
    return found if isinstance(found, Objective) else Objective(found)
