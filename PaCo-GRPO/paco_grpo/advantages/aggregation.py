"""Ways to make one number of several rewards (PaCo-RL, arXiv 2512.04784).

An aggregation is called as ``fn(**grouped_rewards)``: one argument a reward, each ``{group key: np.ndarray (n,)}``,
and returns the same mapping. Its result is group-normalised afterwards unless the function carries
``returns_advantages = True``. It may carry a dict ``stats`` of numbers, logged after each call.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

GroupedRewards = Mapping[str, np.ndarray]
AggregateFn = Callable[..., dict[str, np.ndarray]]

STD_FLOOR = 1e-6


def normalize(values: np.ndarray, std: float | None = None) -> np.ndarray:
    """(values − mean) / max(std, 1e-6); ``std`` defaults to that of ``values``, without Bessel's correction."""
    return (values - values.mean()) / max(values.std() if std is None else std, STD_FLOOR)


def weighted_sum_aggregate_fn(reward_weights: Mapping[str, float]) -> AggregateFn:
    """Σ_r weight_r · r, the default (``aggregate_fn = None``)."""

    def aggregate(**grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
        weights = _weights(reward_weights, grouped_rewards)
        return _per_group(lambda **rewards: sum(weights[name] * rewards[name] for name in rewards), grouped_rewards)

    return aggregate


def geometric_mean_aggregate_fn(**grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
    """(Π_r r)^(1/R), for R rewards ≥ 0.

    Raises:
        ValueError: A reward is negative.
    """
    _require_non_negative("geometric_mean_aggregate_fn", grouped_rewards)

    def mean(**rewards: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # log 0 = −inf, whose exp is the right 0
            return np.exp(np.mean([np.log(values) for values in rewards.values()], axis=0))

    return _per_group(mean, grouped_rewards)


def harmonic_mean_aggregate_fn(**grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
    """R / Σ_r 1/r, for R rewards ≥ 0; 0 where one of them is 0.

    Raises:
        ValueError: A reward is negative.
    """
    _require_non_negative("harmonic_mean_aggregate_fn", grouped_rewards)

    def mean(**rewards: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # 1/0 = inf, and R/inf is the right 0
            return len(rewards) / np.sum([1.0 / values for values in rewards.values()], axis=0)

    return _per_group(mean, grouped_rewards)


class log_tame_aggregate_fn:
    """Log-tamed weighted sum: rewards that vary far more than the others become log(1 + r) before the weighted sum.

    A reward is tamed if its coefficient of variation std/|mean| over the whole batch exceeds the threshold: a number,
    or the ``'mean'`` or ``'median'`` of the rewards' coefficients. After a call, ``stats`` holds the coefficient of
    each reward (``cv/<name>``) and whether it was tamed (``log_tamed/<name>``, 0 or 1).

    Args:
        threshold: ``'mean'``, ``'median'`` or a number ≥ 0.
        reward_weights: Weight by reward name; None = all 1.
    """

    returns_advantages = False

    def __init__(self, threshold: str | float = "mean", reward_weights: Mapping[str, float] | None = None) -> None:
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if not (threshold in ("mean", "median") if not number else threshold >= 0):
            raise ValueError(
                f"log_tame_aggregate_fn: threshold = {threshold!r} must be 'mean', 'median' or a number ≥ 0"
            )
        self.threshold = threshold
        self.reward_weights = reward_weights
        self.stats: dict[str, float] = {}

    def __call__(self, **grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
        """
        Raises:
            ValueError: A reward to be tamed is ≤ −1 somewhere.
        """
        cv = {name: _coefficient_of_variation(groups) for name, groups in grouped_rewards.items()}
        tamed = {name for name in cv if cv[name] > self._limit(list(cv.values()))}
        self.stats = {f"cv/{name}": value for name, value in cv.items()}
        self.stats |= {f"log_tamed/{name}": float(name in tamed) for name in cv}
        transformed = {
            name: {key: _log1p(name, values) for key, values in groups.items()} if name in tamed else groups
            for name, groups in grouped_rewards.items()
        }
        weights = dict.fromkeys(grouped_rewards, 1.0) if self.reward_weights is None else self.reward_weights
        return weighted_sum_aggregate_fn(weights)(**transformed)

    def _limit(self, coefficients: list[float]) -> float:
        if self.threshold == "mean":
            return float(np.mean(coefficients))
        if self.threshold == "median":
            return float(np.median(coefficients))
        return float(self.threshold)


def weighted_advantage_sum_aggregate_fn(reward_weights: Mapping[str, float], global_std: bool = False) -> AggregateFn:
    """Normalise each reward within its groups first, then Σ_r weight_r · A_r. The result is advantages already.

    Args:
        reward_weights: Weight by reward name.
        global_std: Divide by the reward's std over everything instead of over the group.
    """

    def aggregate(**grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
        weights = _weights(reward_weights, grouped_rewards)
        stds = {
            name: float(_concatenate(groups).std()) if global_std else None for name, groups in grouped_rewards.items()
        }
        return _per_group(
            lambda **rewards: sum(weights[name] * normalize(rewards[name], stds[name]) for name in rewards),
            grouped_rewards,
        )

    aggregate.returns_advantages = True
    return aggregate


def get_aggregate_fn(spec: Any, reward_weights: Mapping[str, float], global_std: bool = False) -> AggregateFn | None:
    """What ``config.train.aggregate_fn`` means.

    Args:
        spec: None, a callable, the name of one of this module's functions, or ``package.module:function``.
        reward_weights: For the built-in ones that take weights.
        global_std: For ``weighted_advantage_sum_aggregate_fn``.

    Raises:
        ValueError: An unknown name; the message names the nearest right one.
    """
    if spec is None or callable(spec):
        return spec
    builders: dict[str, Callable[[], AggregateFn]] = {
        "geometric_mean_aggregate_fn": lambda: geometric_mean_aggregate_fn,
        "harmonic_mean_aggregate_fn": lambda: harmonic_mean_aggregate_fn,
        "log_tame_aggregate_fn": lambda: log_tame_aggregate_fn(reward_weights=reward_weights),
        "weighted_advantage_sum_aggregate_fn": lambda: weighted_advantage_sum_aggregate_fn(reward_weights, global_std),
    }
    if spec in builders:
        return builders[spec]()
    if ":" in str(spec):
        return _imported(str(spec))
    near = difflib.get_close_matches(str(spec), builders, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"config.train.aggregate_fn = {spec!r} is unknown: {hint}Known: {', '.join(builders)}, or 'package.module:function'"
    )


def _imported(spec: str) -> AggregateFn:
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"config.train.aggregate_fn = {spec!r} cannot be imported: {error}") from error


def _per_group(function: Callable[..., np.ndarray], grouped: Mapping[str, GroupedRewards]) -> dict[str, np.ndarray]:
    keys = next(iter(grouped.values())).keys()
    return {
        key: function(**{name: np.asarray(groups[key], np.float64) for name, groups in grouped.items()}) for key in keys
    }


def _weights(weights: Mapping[str, float], grouped: Mapping[str, GroupedRewards]) -> Mapping[str, float]:
    missing = [name for name in grouped if name not in weights]
    if missing:
        raise ValueError(f"reward_weights has no weight for {', '.join(missing)} (it has {', '.join(weights)})")
    return weights


def _concatenate(groups: GroupedRewards) -> np.ndarray:
    return np.concatenate([np.asarray(values, np.float64) for values in groups.values()])


def _coefficient_of_variation(groups: GroupedRewards) -> float:
    values = _concatenate(groups)
    std, mean = values.std(), abs(values.mean())
    return 0.0 if std == 0 else float(std / mean) if mean > 0 else float("inf")


def _log1p(name: str, values: np.ndarray) -> np.ndarray:
    if np.min(values) <= -1:
        raise ValueError(
            f"log_tame_aggregate_fn: reward {name!r} reaches {np.min(values):g}, but log(1 + r) needs r > −1: "
            "shift that reward, or choose another aggregate_fn"
        )
    return np.log1p(values)


def _require_non_negative(function: str, grouped: Mapping[str, GroupedRewards]) -> None:
    for name, groups in grouped.items():
        smallest = _concatenate(groups).min()
        if smallest < 0:
            raise ValueError(f"{function}: reward {name!r} reaches {smallest:g}, but every reward must be ≥ 0")
