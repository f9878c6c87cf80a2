"""Generators behind one interface. ``load_policy`` picks the class by the pipeline named in ``model_index.json``."""

from paco_grpo.policies.base import Policy, PolicyLoadError
from paco_grpo.policies.loading import (
    POLICIES,
    fewest_steps,
    load_policy,
    policy_class,
    size_multiple,
)

__all__ = [
    "POLICIES",
    "Policy",
    "PolicyLoadError",
    "fewest_steps",
    "load_policy",
    "policy_class",
    "size_multiple",
]
