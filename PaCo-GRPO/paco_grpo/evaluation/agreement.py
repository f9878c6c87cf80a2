"""Agreement beyond chance: panels of one image agree, while images of one prompt still differ (docs/rewards.md).

For a prompt with k ≥ 4 images, ``w`` is the mean P(Yes) over pairs of panels of one image (``consistency_score``) and ``b``
the mean P(Yes) over pairs of panels of different images (1 − ``between_images``). With W and B their means over *open*
prompts, κ = (W − B) / (1 − B): Cohen's κ (1960), with B as the chance level.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.evaluation.benchmarks import Interval, bootstrap, by_prompt, interval
from paco_grpo.evaluation.pictures import markdown_table
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import short_name

LEAST_IMAGES = 4  # of a prompt


@dataclass(frozen=True)
class Agreement:
    """Means over prompts; None where no prompt has the score, and b and κ without open prompts."""

    within: Interval | None
    between: Interval | None
    kappa: Interval | None
    missing: int  # images without one of the scores; they are left out of the means


def kappa(within: np.ndarray | float, between: np.ndarray | float) -> np.ndarray:
    """(W − B) / (1 − B); NaN where B is 1."""
    within, between = np.asarray(within, np.float64), np.asarray(between, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(between < 1, (within - between) / (1 - between), np.nan)


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs among ``names``: ``consistency_score`` with ``between_images``, ``X_consistency`` with ``X_between_images``."""
    names = set(names)
    prefixes = sorted(
        name.removesuffix("between_images") for name in names if name.endswith("between_images")
    )
    found = (
        (w, f"{p}between_images")
        for p in prefixes
        for w in (f"{p}consistency_score", f"{p}consistency")
    )
    return [pair for pair in found if pair[0] in names]


def of_epoch(
    scores: Mapping[str, np.ndarray], item_ids: np.ndarray, is_open: Sequence[bool]
) -> dict[str, float]:
    """``reward/within``, ``reward/between`` and ``reward/kappa`` of a training epoch, over its open prompts.

    Args:
        scores: Short name → (samples,), NaN = missing; {} is returned unless they have the two rewards.
        item_ids: (samples,)
        is_open: By item id.
    """
    for names in pairs_of(scores)[:1]:
        rows = [
            {"item_id": item, "rewards": {name: scores[name][i] for name in names}}
            for i, item in enumerate(item_ids.tolist())
            if is_open[item]
        ]
        found = _within_between(rows, names)
        found = found[~np.isnan(found).any(axis=1)]
        if len(found):
            within, between = found.mean(axis=0)
            values = {"within": within, "between": between, "kappa": kappa(within, between)}
            return {f"reward/{name}": float(value) for name, value in values.items()}
    return {}


def measuring(options: RunOptions, images_per_prompt: int) -> RunOptions:
    """``options`` whose test rewards are enough for κ: ``between_images`` is added beside ``consistency_score``."""
    if images_per_prompt < LEAST_IMAGES:
        raise ConfigError(
            f"--images_per_prompt {images_per_prompt} must be at least {LEAST_IMAGES}"
        )
    test = options.test
    rewards = dict(test.reward_fn or options.train.reward_fn)
    kwargs = options.train.reward_fn_kwargs | test.reward_fn_kwargs
    if not pairs_of(map(short_name, rewards)):
        if "consistency_score" not in rewards:
            given = ", ".join(rewards)
            raise ConfigError(
                f"--images_per_prompt needs the test reward consistency_score, not only {given}"
            )
        rewards["between_images"] = 1.0
        kwargs["between_images"] = kwargs.get("consistency_score", {})
    return dataclasses.replace(
        options, test=dataclasses.replace(test, reward_fn=rewards, reward_fn_kwargs=kwargs)
    )


def agreement(
    rows: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Agreement]:
    """Agreement of each category of prompts and of all, from an evaluation's rows.

    Args:
        rows: Rows of ``eval_data.jsonl``, several for each prompt.
        against: Rows of another evaluation of the same prompts and seeds: then differences, paired by prompt.

    Returns:
        Category → agreement; with several pairs of rewards, for each pair "category, name of the within-image reward".
    """
    pairs, both = pairs_of(rows[0]["rewards"]), [rows] if against is None else [rows, against]
    categories = [
        *dict.fromkeys(row["category"] for row in rows if row["category"] is not None),
        "all",
    ]
    return {
        category if len(pairs) == 1 else f"{category}, {names[0]}": _summary(
            [[row for row in side if category in ("all", row["category"])] for side in both], names
        )
        for names in pairs
        for category in categories
    }


def _within_between(rows: Sequence[Mapping[str, Any]], names: tuple[str, str]) -> np.ndarray:
    """w and b of each prompt (prompts, 2), means over its images that have the score; NaN where none has."""
    means = by_prompt(
        rows, names, lambda values, axis: np.ma.masked_invalid(values).mean(axis).filled(np.nan)
    )
    return [0, 1] + [1, -1] * means


def _summary(sides: Sequence[Sequence[Mapping[str, Any]]], names: tuple[str, str]) -> Agreement:
    """``sides``: rows of one evaluation, or of the two whose difference is wanted."""
    missing = sum(
        None in (row["rewards"][name] for name in names) for side in sides for row in side
    )
    is_open = np.array(list({row["item_id"]: bool(row.get("open")) for row in sides[0]}.values()))
    values = [_within_between(side, names) for side in sides]
    difference = values[0] - values[1] if len(values) == 2 else values[0]
    usable = is_open & ~np.isnan(np.concatenate(values, axis=1)).any(axis=1)

    def of_draws(chosen: np.ndarray) -> np.ndarray:
        first, *second = (kappa(*each[usable][chosen].mean(axis=1).T) for each in values)
        return first - second[0] if second else first

    between = interval(difference[is_open, 1])
    return Agreement(
        interval(difference[:, 0]), between, bootstrap(of_draws, int(usable.sum())), missing
    )


def table(columns: Mapping[str, Mapping[str, Agreement]]) -> str:
    """Markdown: for each category and each column (an adapter, or a difference), w, b and κ with 95 % intervals."""
    rows = []
    for category in next(iter(columns.values())):
        for name, column in columns.items():
            found = column[category]
            values = [each or "–" for each in (found.within, found.between, found.kappa)]
            rows.append(
                [category, name, *values, found.kappa.prompts if found.kappa else 0, found.missing]
            )
    return markdown_table(
        ["prompts", "", "w (within)", "b (between)", "κ", "open prompts", "missing"], rows
    )
