"""Group-relative advantages (docs/method.md §5): samples are grouped by prompt *item*, not by text.

A sample with a missing reward is left out of its group.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from paco_grpo.options import RunOptions
from paco_grpo.types import Item

GroupedRewards = Mapping[str, np.ndarray]
AggregateFn = Callable[..., dict[str, np.ndarray]]
STD_FLOOR = 1e-6
_STATS = ("missing_share", "dropped_share", "group_size_mean", "zero_std_share", "mean_abs")


@dataclass(frozen=True)
class SetRewards:
    """What a prompt set is trained on."""

    name: str  # "" for the only set of a run
    weights: Mapping[str, float]  # by short name; rewards with weight 0 are not in it
    aggregate_fn: AggregateFn


@dataclass(frozen=True)
class AdvantageResult:
    """What ``compute_advantages`` returns, for the N samples of an epoch."""

    advantages: np.ndarray  # (N,) float64; 0 where not kept
    kept: np.ndarray  # (N,) bool: has all rewards and is in a group of at least two
    # For the log: zero_std_share (of groups whose aggregate does not vary), dropped_share (of
    # samples not kept), …
    stats: dict[str, float]


def compute_advantages(
    rewards: Mapping[str, np.ndarray],
    item_ids: Sequence[int] | np.ndarray,
    prompts: Sequence[str],
    aggregate_fn: AggregateFn,
    options: RunOptions,
    people: Collection[str] = (),
) -> AdvantageResult:
    """Advantages of all N samples of an epoch (gathered over processes).

    Args:
        rewards: Name → (N,), NaN = missing.
        item_ids: (N,), the groups.
        prompts: (N,) texts; the keys that ``aggregate_fn`` sees are made from them.
        aggregate_fn: Several rewards → one number, see :mod:`paco_grpo.advantages.aggregation`.
        options: ``sample.global_std``, ``per_prompt_stat_tracking`` and ``train.rank_grpo``, as
            docs/configuration.md describes them, and ``sample.num_images_per_prompt``: with 1,
            all samples are one group.
        people: Of the names, those of votes. A vote that is NaN is absent, not missing. A group
            whose votes are all equal is left out.

    Raises:
        ValueError: ``aggregate_fn`` returns other keys or lengths, or a value that is not finite.
    """
    item_ids = np.asarray(item_ids)
    scores = {name: np.array(values, np.float64) for name, values in rewards.items()}
    lacks = {name: np.isnan(values) for name, values in scores.items()}
    lacks_one = np.any(list(lacks.values()), axis=0)
    missing = np.zeros(len(item_ids), bool)
    for name in lacks.keys() - people:
        missing |= lacks[name]
    groups = _groups(item_ids, prompts, lacks_one, options)
    for name in scores.keys() & people:
        for key, members in list(groups.items()):
            if np.ptp(scores[name][members]) == 0:
                del groups[key]
    members_of_groups = list(groups.values())
    kept = np.zeros(len(item_ids), dtype=bool)
    for members in members_of_groups:
        kept[members] = True
    stats = {
        "missing_share": float(missing.mean()),
        "dropped_share": float(1 - kept.mean()),
        "group_size_mean": float(kept.sum() / max(len(groups), 1)),
        "zero_std_share": 0.0,
        "mean_abs": 0.0,
    }
    advantages = np.zeros(len(item_ids))
    if not groups:
        return AdvantageResult(advantages, kept, stats)

    # Several rewards become one number per sample.
    if options.train.rank_grpo:
        scores = {name: _ranks(values, members_of_groups) for name, values in scores.items()}
    totals = _aggregate(aggregate_fn, scores, groups)
    is_advantage = getattr(aggregate_fn, "returns_advantages", False)

    # That number is compared with the others of its group.
    std = None
    if options.sample.global_std:
        std = float(np.concatenate(list(totals.values())).std())
    for key, members in groups.items():
        advantages[members] = totals[key] if is_advantage else normalize(totals[key], std)

    # np.ptp, because the std of equal numbers can be a rounding error above 0
    stats["zero_std_share"] = float(np.mean([np.ptp(total) == 0 for total in totals.values()]))
    stats["mean_abs"] = float(np.abs(advantages[kept]).mean())
    for name, value in getattr(aggregate_fn, "stats", {}).items():
        stats[name] = float(value)
    return AdvantageResult(advantages, kept, stats)


def aggregate(
    rewards: Mapping[str, np.ndarray],
    item_ids: np.ndarray,
    prompts: Sequence[str],
    aggregate_fn: AggregateFn,
    options: RunOptions,
) -> np.ndarray:
    """The aggregate of each of N images' rewards, also for the only image of a prompt.

    Arguments and errors are those of ``compute_advantages``. Returns (N,), NaN where a reward is
    missing.
    """
    missing = np.isnan(np.stack(list(rewards.values()))).any(axis=0)
    groups = _groups(item_ids, prompts, missing, options, least=1)
    totals = np.full(len(item_ids), np.nan)
    if groups:
        for key, values in _aggregate(aggregate_fn, rewards, groups).items():
            totals[groups[key]] = values
    return totals


def advantages_of_sets(
    scores: Mapping[str, np.ndarray],
    item_ids: np.ndarray,
    items: Sequence[Item],
    set_rewards: Sequence[SetRewards],
    options: RunOptions,
    people: Collection[str] = (),
) -> AdvantageResult:
    """Advantages of all N samples of an epoch, by the rewards of their prompt sets.

    Statistics over all samples, such as a standard deviation, are taken for each set alone. With
    several sets, ``stats`` has the numbers of each, and their means weighted by images.

    Args:
        scores: Name → (N,), NaN = missing or absent.
        item_ids: (N,), index into ``items``.
        items: Of all sets.
        set_rewards: Of each set, by its number.
        options, people: As for ``compute_advantages``.

    Raises:
        ValueError: As ``compute_advantages``.
    """
    datasets = np.array([items[i].dataset for i in item_ids])
    total = AdvantageResult(np.zeros(len(item_ids)), np.zeros(len(item_ids), bool), {})
    sizes = []
    for number, trained_set in enumerate(set_rewards):
        members = np.flatnonzero(datasets == number)
        prompts = [items[i].prompt for i in item_ids[members]]
        rewards = {name: scores[name][members] for name in trained_set.weights}
        result = compute_advantages(
            rewards, item_ids[members], prompts, trained_set.aggregate_fn, options, people
        )
        if len(set_rewards) == 1:
            return result
        total.advantages[members] = result.advantages
        total.kept[members] = result.kept
        sizes.append(len(members))
        for name, value in result.stats.items():
            total.stats[f"{trained_set.name}/{name}"] = value
    for name in _STATS:
        values = [total.stats[f"{trained_set.name}/{name}"] for trained_set in set_rewards]
        total.stats[name] = float(np.average(values, weights=sizes))
    return total


def normalize(values: np.ndarray, std: float | None = None) -> np.ndarray:
    """(values − mean) / max(std, 1e-6); the default is the population std of ``values``."""
    return (values - values.mean()) / max(values.std() if std is None else std, STD_FLOOR)


def weighted_sum(
    reward_weights: Mapping[str, float], /, **grouped_rewards: GroupedRewards
) -> dict[str, np.ndarray]:
    """Σ_r weight_r · r, the default (``aggregate_fn = None``)."""
    missing = [name for name in grouped_rewards if name not in reward_weights]
    if missing:
        raise ValueError(
            f"reward_weights has no weight for {', '.join(missing)} "
            f"(it has {', '.join(reward_weights)})"
        )
    return per_group(lambda r: sum(reward_weights[name] * r[name] for name in r), grouped_rewards)


def per_group(
    function: Callable[[dict[str, np.ndarray]], np.ndarray],
    grouped: Mapping[str, GroupedRewards],
    least: float = -np.inf,
) -> dict[str, np.ndarray]:
    """``function`` of each group's ``{reward: (n,) float64}``.

    Raises ValueError where a reward is below ``least``.
    """
    for name, groups in grouped.items():
        smallest = concatenate(groups).min()
        if smallest < least:
            raise ValueError(
                f"reward {name!r} reaches {smallest:g}, "
                f"but this aggregation needs rewards ≥ {least:g}"
            )
    totals = {}
    for key in next(iter(grouped.values())):
        rewards = {}
        for name, groups in grouped.items():
            rewards[name] = np.asarray(groups[key], np.float64)
        totals[key] = function(rewards)
    return totals


def concatenate(groups: GroupedRewards) -> np.ndarray:
    return np.concatenate([np.asarray(values, np.float64) for values in groups.values()])


def _ranks(values: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
    """``values`` (N,) replaced by ranks within each group: 0 worst, 1 best, ties averaged."""
    ranks = values.copy()
    for members in groups:
        ranks[members] = (rankdata(values[members]) - 1) / (len(members) - 1)
    return ranks


def _aggregate(
    function: AggregateFn, scores: Mapping[str, np.ndarray], groups: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Key of a group → the aggregate of its rewards, (number of members,).

    Raises ValueError as ``compute_advantages``.
    """
    grouped = {}
    for name, values in scores.items():
        grouped[name] = {key: values[members] for key, members in groups.items()}
    totals = {}
    for key, total in function(**grouped).items():
        totals[key] = np.asarray(total, np.float64)
    if totals.keys() != groups.keys():
        key = min(map(str, totals.keys() ^ groups.keys()))
        raise ValueError(
            f"it must return the keys of its arguments; {_shortened(key)!r} is in one of the two"
        )
    for key, members in groups.items():
        total = totals[key]
        if total.shape != members.shape:
            raise ValueError(
                f"it must return one number for each image, an array of shape {members.shape} for "
                f"{_shortened(key)!r}, got {total.shape}"
            )
        wrong = np.flatnonzero(~np.isfinite(total))
        if len(wrong):
            raise ValueError(
                f"it must return finite numbers, got {total[wrong[0]]} for image {wrong[0]} of "
                f"{_shortened(key)!r}"
            )
    return totals


def _shortened(key: str) -> str:
    return key if len(key) <= 60 else f"{key[:57]}..."


def _groups(
    item_ids: np.ndarray,
    prompts: Sequence[str],
    missing: np.ndarray,
    options: RunOptions,
    least: int = 2,
) -> dict[str, np.ndarray]:
    """Key → positions of the kept samples of each group of at least ``least``, in order.

    A key is the prompt's text; where two items share it, text plus item id; "all" for one group of
    everything.
    """
    # With one image per prompt, only items that an epoch repeats would form groups.
    per_prompt = options.per_prompt_stat_tracking and options.sample.num_images_per_prompt > 1
    if not per_prompt:
        everything = np.flatnonzero(~missing)
        if len(everything) < least:
            return {}
        one_item = len(set(item_ids[everything].tolist())) == 1
        return {prompts[everything[0]] if one_item else "all": everything}
    groups = {}
    for item in dict.fromkeys(item_ids.tolist()):
        members = np.flatnonzero((item_ids == item) & ~missing)
        if len(members) >= least:
            groups[item] = members
    texts = [prompts[members[0]] for members in groups.values()]
    keyed = {}
    for (item, members), text in zip(groups.items(), texts, strict=True):
        key = text if texts.count(text) == 1 else f"{text} [item {item}]"
        keyed[key] = members
    return keyed
