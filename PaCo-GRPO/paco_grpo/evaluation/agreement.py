"""Agreement beyond chance: panels of one image agree, while images of one prompt still differ from each other.

For a prompt with k ≥ 4 images, ``w`` is the mean P(Yes) over pairs of panels of one image (``consistency_score``) and ``b``
the mean P(Yes) over pairs of panels of different images (1 − ``between_images``). With W and B their means over prompts,

    κ = (W − B) / (1 − B)

1: panels agree and images differ. 0: panels of one image are no more alike than panels of different images, which is what
a collapsed generator gives, however consistent it is. κ is about *open* prompts, which leave something unspecified. Where a
prompt describes everything, b is rightly high, and only w is reported. The form is Cohen's κ (1960), with B as the chance
level.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.evaluation.benchmarks import LEVEL, RESAMPLES, Interval, interval
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import short_name

LEAST_IMAGES = 4  # of a prompt


@dataclass(frozen=True)
class Agreement:
    """Means over prompts with bootstrap intervals; None where no prompt has the score, and b and κ without open prompts."""

    within: Interval | None
    between: Interval | None
    kappa: Interval | None
    missing: int  # images without one of the scores; they are left out of the means


def kappa(within: np.ndarray | float, between: np.ndarray | float) -> np.ndarray:
    """(W − B) / (1 − B) of mean within- and between-image P(Yes); NaN where B is 1."""
    within, between = np.asarray(within, np.float64), np.asarray(between, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(between < 1, (within - between) / (1 - between), np.nan)


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The within- and between-image rewards among ``names`` that belong together.

    ``consistency_score`` and ``between_images``, or ``X_consistency`` and ``X_between_images`` of your own.
    """
    names = set(names)
    prefixes = sorted(name.removesuffix("between_images") for name in names if name.endswith("between_images"))
    found = ((w, f"{p}between_images") for p in prefixes for w in (f"{p}consistency_score", f"{p}consistency"))
    return [pair for pair in found if pair[0] in names]


def of_epoch(scores: Mapping[str, np.ndarray], item_ids: np.ndarray, is_open: Sequence[bool]) -> dict[str, float]:
    """``reward/within``, ``reward/between`` and ``reward/kappa`` of a training epoch, over its open prompts.

    Args:
        scores: Short name → (n,), NaN = missing; {} is returned unless they have the two rewards.
        item_ids: (n,) of the samples.
        is_open: Of each item.
    """
    for names in pairs_of(scores)[:1]:
        rows = [
            {"item_id": item, "rewards": {name: None if np.isnan(scores[name][i]) else scores[name][i] for name in names}}
            for i, item in enumerate(item_ids.tolist())
            if is_open[item]
        ]
        found = [value for value in _by_prompt(rows, *names).values() if not np.isnan(value).any()]
        if found:
            within, between = np.mean(found, axis=0)
            values = {"within": within, "between": between, "kappa": float(kappa(within, between))}
            return {f"reward/{name}": float(value) for name, value in values.items()}
    return {}


def measuring(options: RunOptions, images_per_prompt: int) -> RunOptions:
    """``options`` whose test rewards include those of κ: ``between_images`` is added beside ``consistency_score``.

    Raises:
        ConfigError: Fewer than four images a prompt, or test rewards without ``consistency_score``.
    """
    if images_per_prompt < LEAST_IMAGES:
        raise ConfigError(f"--images_per_prompt {images_per_prompt} must be at least {LEAST_IMAGES}")
    test = options.test
    rewards, kwargs = (
        dict(test.reward_fn or options.train.reward_fn),
        options.train.reward_fn_kwargs | test.reward_fn_kwargs,
    )
    if not pairs_of(map(short_name, rewards)):
        if "consistency_score" not in rewards:
            raise ConfigError(
                f"--images_per_prompt needs the test reward consistency_score, not only {', '.join(rewards)}"
            )
        rewards["between_images"] = 1.0
        kwargs["between_images"] = kwargs.get("consistency_score", {})
    return dataclasses.replace(options, test=dataclasses.replace(test, reward_fn=rewards, reward_fn_kwargs=kwargs))


def agreement(
    rows: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Agreement]:
    """Agreement of each category of prompts and of all, from an evaluation's rows.

    Args:
        rows: Of ``eval_data.jsonl``, with several images of each prompt.
        against: Rows of another evaluation of the same prompts and seeds: then differences, paired by prompt.

    Returns:
        Category → agreement; with several pairs of rewards, for each pair "category, name of the within-image reward".
        Empty unless the rows have such rewards.
    """
    pairs = pairs_of(rows[0]["rewards"])
    categories: dict[str, list[int]] = {}
    for row in rows:
        if row["category"] is not None:
            categories.setdefault(row["category"], []).append(row["item_id"])
    categories["all"] = [row["item_id"] for row in rows]
    is_open = {row["item_id"]: bool(row.get("open")) for row in rows}
    found = {}
    for names in pairs:
        sides = [_by_prompt(side, *names) for side in (rows, against) if side is not None]
        missing = Counter(
            row["item_id"] for side in (rows, against or ()) for row in side if None in map(row["rewards"].get, names)
        )
        for category, items in categories.items():
            items = list(dict.fromkeys(items))
            values = [np.array([side[item] for item in items]) for side in sides]
            found[category if len(pairs) == 1 else f"{category}, {names[0]}"] = _summary(
                values, np.array([is_open[item] for item in items]), sum(missing[item] for item in items)
            )
    return found


def _by_prompt(rows: Sequence[Mapping[str, Any]], within: str, between: str) -> dict[int, tuple[float, float]]:
    """Item → (w, b), means over its images that have the score; NaN where none has."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        w, different = (math.nan if (v := row["rewards"][name]) is None else v for name in (within, between))
        found.setdefault(row["item_id"], []).append((w, 1 - different))
    return {item: tuple(map(_mean_of_present, zip(*values, strict=True))) for item, values in found.items()}


def _mean_of_present(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return float(np.mean(present)) if present else math.nan


def _summary(sides: Sequence[np.ndarray], is_open: np.ndarray, missing: int) -> Agreement:
    """``sides``: (P, 2) w and b of each prompt, of one evaluation or of the two whose difference is wanted."""
    difference = sides[0] - sides[1] if len(sides) == 2 else sides[0]
    usable = is_open & ~np.isnan(np.concatenate(sides, axis=1)).any(axis=1)
    return Agreement(
        interval(difference[:, 0]),
        interval(difference[is_open, 1]),
        _kappa_interval([side[usable] for side in sides]),
        missing,
    )


def _kappa_interval(sides: Sequence[np.ndarray]) -> Interval | None:
    """κ, or the difference of two, with the percentile interval of prompts drawn with replacement."""

    def value(chosen: np.ndarray) -> np.ndarray:
        """κ of each draw (R,) of prompts ``chosen`` (R, P)."""
        kappas = [kappa(*side[chosen].mean(axis=1).T) for side in sides]
        return kappas[0] - kappas[1] if len(kappas) == 2 else kappas[0]

    count = len(sides[0])
    if count == 0:
        return None
    mean = float(value(np.arange(count)[None])[0])
    if math.isnan(mean):
        return None
    if count == 1:
        return Interval(mean, None, None, 1)
    drawn = value(np.random.default_rng(0).integers(count, size=(RESAMPLES, count)))
    low, high = np.nanquantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), count)


def table(columns: Mapping[str, Mapping[str, Agreement]]) -> str:
    """Markdown: for each category and each column (an adapter, or a difference), w, b and κ with 95 % intervals."""
    lines = ["| prompts | | w (within) | b (between) | κ | open prompts | missing |", "|---" * 7 + "|"]
    for category in next(iter(columns.values())):
        for name, found in columns.items():
            each = found[category]
            values = [str(v or "–") for v in (each.within, each.between, each.kappa)]
            count = each.kappa.prompts if each.kappa else 0
            lines.append(f"| {category} | {name} | {' | '.join(values)} | {count} | {each.missing} |")
    return "\n".join(lines) + "\n"
