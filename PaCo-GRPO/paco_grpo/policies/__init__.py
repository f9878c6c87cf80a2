"""Generators behind one interface.

``load_policy`` picks the class by the pipeline that ``model_index.json`` names.
"""

from paco_grpo.policies.base import Policy, PolicyLoadError, PolicySettings
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
    "PolicySettings",
    "fewest_steps",
    "load_policy",
    "policy_class",
    "size_multiple",
]
