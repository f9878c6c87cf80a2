"""How several rewards become one number per sample (docs/method.md §5; PaCo-RL, arXiv 2512.04784).

``groups`` has the default, the weighted sum. An aggregation is called as
``fn(**grouped_rewards)``: one argument per reward, each ``{group key: np.ndarray (n,)}``. It
returns one such mapping, which is group-normalized unless the function carries
``returns_advantages = True``. A dict ``stats`` of numbers on the function is logged after each
call.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from scipy.stats import gmean, hmean

from paco_grpo.advantages.groups import (
    STD_FLOOR,
    AggregateFn,
    GroupedRewards,
    concatenate,
    normalize,
    per_group,
    weighted_sum,
)
from paco_grpo.names import find_function, place_of


def geometric_mean_aggregate_fn(**grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
    """(Π_r r)^(1/R), for R rewards ≥ 0."""
    return per_group(lambda r: gmean(list(r.values()), axis=0), grouped_rewards, least=0)


def harmonic_mean_aggregate_fn(**grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
    """R / Σ_r 1/r, for R rewards ≥ 0; 0 where one of them is 0."""
    return per_group(lambda r: hmean(list(r.values()), axis=0), grouped_rewards, least=0)


@dataclass(eq=False)
class product_aggregate_fn:
    """Π_r r^weight_r, for rewards ≥ 0: a reward near 0 cannot be outweighed by the others."""

    reward_weights: Mapping[str, float]  # exponents ≥ 0

    def __call__(self, **grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
        """The product of each group."""

        def product(rewards: dict[str, np.ndarray]) -> np.ndarray:
            powers = [values ** self.reward_weights[name] for name, values in rewards.items()]
            return np.prod(powers, axis=0)

        return per_group(product, grouped_rewards, least=0)


@dataclass(eq=False)
class log_tame_aggregate_fn:
    """Weighted sum in which rewards that vary a lot become log(1 + r) first.

    They are those whose coefficient of variation, std/|mean| over the batch, exceeds the threshold.
    ``stats``: ``cv/<name>``, each coefficient, and ``log_tamed/<name>``, 0 or 1.
    """

    threshold: str | float = "mean"  # ≥ 0, or 'mean' or 'median' of the rewards' coefficients
    reward_weights: Mapping[str, float] | None = None  # None = all 1
    stats: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.threshold, int | float):
            is_valid = self.threshold >= 0
        else:
            is_valid = self.threshold in ("mean", "median")
        if not is_valid:
            raise ValueError(
                f"threshold = {self.threshold!r} must be 'mean', 'median' or a number ≥ 0"
            )

    def __call__(self, **grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
        """The weighted sum of each group; ``stats`` is set."""
        variations = {}
        for name, groups in grouped_rewards.items():
            variations[name] = _coefficient_of_variation(concatenate(groups))
        tamed = self._tamed(variations)
        self.stats = {}
        for name, variation in variations.items():
            self.stats[f"cv/{name}"] = variation
            self.stats[f"log_tamed/{name}"] = float(name in tamed)
        return self._sum(tamed, grouped_rewards)

    def as_for(self, scores: Mapping[str, np.ndarray]) -> AggregateFn:
        """The aggregation that always tames what this one would in a batch of these scores.

        ``scores`` are (images,), NaN = missing.
        """
        variations = {}
        for name, values in scores.items():
            variations[name] = _coefficient_of_variation(values[~np.isnan(values)])
        tamed = self._tamed(variations)
        return lambda **grouped_rewards: self._sum(tamed, grouped_rewards)

    def _tamed(self, variations: Mapping[str, float]) -> list[str]:
        threshold = self.threshold
        if threshold == "mean":
            threshold = np.mean(list(variations.values()))
        elif threshold == "median":
            threshold = np.median(list(variations.values()))
        return [name for name, variation in variations.items() if variation > threshold]

    def _sum(
        self, tamed: Sequence[str], grouped_rewards: Mapping[str, GroupedRewards]
    ) -> dict[str, np.ndarray]:
        rewards = {}
        for name, groups in grouped_rewards.items():
            rewards[name] = _log_tamed(name, groups) if name in tamed else groups
        weights = self.reward_weights
        if weights is None:
            weights = dict.fromkeys(grouped_rewards, 1.0)
        return weighted_sum(weights, **rewards)


def _coefficient_of_variation(values: np.ndarray) -> float:
    """std/|mean|; 0 where nothing varies."""
    if values.std() == 0:
        return 0.0
    with np.errstate(divide="ignore"):
        return float(values.std() / abs(values.mean()))


def _log_tamed(name: str, groups: GroupedRewards) -> dict[str, np.ndarray]:
    least = concatenate(groups).min()
    if least <= -1:
        raise ValueError(
            f"log_tame_aggregate_fn: {name!r} reaches {least:g}, but log(1 + r) needs r > −1"
        )
    return {key: np.log1p(values) for key, values in groups.items()}


@dataclass(eq=False)
class weighted_advantage_sum_aggregate_fn:
    """Normalize each reward within its groups first, then Σ_r weight_r · A_r.

    The result is advantages already.
    """

    reward_weights: Mapping[str, float]
    global_std: bool = False  # divide by the reward's std over everything instead of over the group
    # Divide the sums by their std over everything (GDPO, arXiv 2601.05242); their mean is 0.
    batch_std: bool = False
    returns_advantages: ClassVar[bool] = True

    def __call__(self, **grouped_rewards: GroupedRewards) -> dict[str, np.ndarray]:
        """The advantages of each group."""
        normalized: dict[str, dict[str, np.ndarray]] = {}
        for name, groups in grouped_rewards.items():
            std = float(concatenate(groups).std()) if self.global_std else None
            normalized[name] = {}
            for key, values in groups.items():
                normalized[name][key] = normalize(np.asarray(values, np.float64), std)
        total = weighted_sum(self.reward_weights, **normalized)
        if self.batch_std:
            std = max(float(concatenate(total).std()), STD_FLOOR)
            total = {key: values / std for key, values in total.items()}
        return total


MEANS = {fn.__name__: fn for fn in (geometric_mean_aggregate_fn, harmonic_mean_aggregate_fn)}
FACTORIES = {
    cls.__name__: cls
    for cls in (log_tame_aggregate_fn, product_aggregate_fn, weighted_advantage_sum_aggregate_fn)
}


def get_aggregate_fn(
    spec: Any, reward_weights: Mapping[str, float] | None = None, global_std: bool = False
) -> AggregateFn | None:
    """The aggregation of a run. Raises ValueError: There is none, or its arguments are wrong.

    Args:
        spec: ``config.train.aggregate_fn``: None, a function, or what ``describe`` records of one.
        reward_weights, global_std: Of the run: defaults of the built-in functions that take them.
    """
    of_run = {"reward_weights": reward_weights, "global_std": global_std}
    name = spec
    arguments: Mapping[str, Any] = {}
    if _is_table(spec):
        name = spec.get("name")
        arguments = spec.get("arguments", {})
    try:
        if spec is None or callable(spec):
            function = spec
        elif name in FACTORIES:
            parameters = _arguments(FACTORIES[name])
            defaults = {key: value for key, value in of_run.items() if key in parameters}
            function = FACTORIES[name](**defaults | dict(arguments))
        elif arguments:
            raise TypeError(f"only {', '.join(FACTORIES)} take arguments")
        else:
            function = MEANS.get(name) or find_function(str(name), [*MEANS, *FACTORIES])
        # Checked here, because the function is called only after an epoch's sampling.
        if function is not None and reward_weights:
            inspect.signature(function).bind(**reward_weights)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.train.aggregate_fn={spec!r} cannot be used: {error}") from error
    function_weights = getattr(function, "reward_weights", None)
    if function_weights is not None:
        lacking = [name for name in reward_weights or () if name not in function_weights]
        if lacking:
            names = ", ".join(lacking)
            raise ValueError(f"config.train.aggregate_fn: its reward_weights lack {names}")
    return function


def describe(aggregate_fn: Any) -> str | dict[str, Any] | None:
    """What config.yaml records of an aggregation; ``get_aggregate_fn`` finds it again by that.

    A built-in mean: its name. A built-in factory's result: ``{"name": …, "arguments": {…}}``.
    Another function: where it is. Raises ValueError for a lambda or a function inside a function.
    """
    if aggregate_fn is None or isinstance(aggregate_fn, str) or _is_table(aggregate_fn):
        return aggregate_fn
    factory = type(aggregate_fn)
    if factory in FACTORIES.values():
        arguments = {}
        for argument in _arguments(factory):
            value = getattr(aggregate_fn, argument)
            if _is_table(value):
                value = {name: float(weight) for name, weight in value.items()}
            arguments[argument] = value
        return {"name": factory.__name__, "arguments": arguments}
    if aggregate_fn in MEANS.values():
        return aggregate_fn.__name__
    try:
        return place_of(aggregate_fn)
    except ValueError as error:
        raise ValueError(f"config.train.aggregate_fn is {error}") from error


def own_weights(spec: Any) -> Mapping[str, float] | None:
    """What ``config.train.aggregate_fn`` uses in place of the run's weights; {}: no weights.

    None: It uses the run's, or we cannot know.
    """
    name = describe(spec)
    arguments: Mapping[str, Any] = {}
    if _is_table(name):
        arguments = name.get("arguments", {})
        name = name.get("name")
    if name in MEANS:
        return {}
    if "reward_weights" not in arguments:
        return None
    return arguments["reward_weights"] or {}


def _is_table(value: object) -> bool:
    return hasattr(value, "items")  # a dict or a ConfigDict


def _arguments(factory: type) -> list[str]:
    return [field.name for field in dataclasses.fields(factory) if field.init]
