"""Group-relative advantages from rewards."""

from paco_grpo.advantages.aggregation import get_aggregate_fn
from paco_grpo.advantages.groups import AdvantageResult, compute_advantages

__all__ = ["AdvantageResult", "compute_advantages", "get_aggregate_fn"]
