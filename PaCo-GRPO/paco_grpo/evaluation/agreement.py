"""w, b and w − b: panels of an image agree, images of a prompt differ (docs/rewards.md).

For a prompt with several images, ``w`` is the mean P(Yes) over pairs of panels of one image
(``consistency_score``), and ``b`` the mean P(Yes) over pairs of panels of different images of the
same *open* prompt (1 − ``between_images``). w − b is the "differential identifiability" of Amico and
Goñi (2018, arXiv:1707.02365): similarity within minus similarity between. It rises
with agreement and falls when all images become the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paco_grpo.evaluation.intervals import Interval, Row, by_prompt, interval
from paco_grpo.evaluation.pictures import markdown_table
from paco_grpo.options import ConfigError, RunOptions
from paco_grpo.rewards.registry import short_name

LEAST_IMAGES = 4  # of a prompt


@dataclass(frozen=True)
class Agreement:
    """Means over prompts; None where no prompt has the scores. b and w − b need open prompts."""

    within: Interval | None
    between: Interval | None
    within_minus_between: Interval | None
    missing: int  # images without one of the scores; they are left out of the means


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs of rewards among ``names`` that measure w and b.

    ``consistency_score`` belongs to ``between_images``, and ``X_consistency`` or
    ``X_consistency_score`` to ``X_between_images``.
    """
    names = set(names)
    suffix = "between_images"
    prefixes = sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))
    pairs = []
    for prefix in prefixes:
        for within in (f"{prefix}consistency_score", f"{prefix}consistency"):
            if within in names:
                pairs.append((within, f"{prefix}{suffix}"))
    return pairs


def of_epoch(
    scores: Mapping[str, np.ndarray], item_ids: np.ndarray, is_open: Sequence[bool]
) -> dict[str, float]:
    """``reward/within``, ``reward/between`` and their difference of a training epoch.

    Means over its open prompts; {} without two rewards that measure them, or without such prompts.

    Args:
        scores: Short name → (samples,), NaN = missing.
        item_ids: (samples,)
        is_open: By item id.
    """
    pairs = pairs_of(scores)
    if not pairs:
        return {}
    rows = []
    for position, item_id in enumerate(item_ids.tolist()):
        rewards = {name: scores[name][position] for name in pairs[0]}
        rows.append({"item_id": item_id, "open": is_open[item_id], "rewards": rewards})
    values = _measures(rows, pairs[0])
    values = values[~np.isnan(values).any(axis=1)]
    if not len(values):
        return {}
    within, between, difference = values.mean(axis=0).tolist()
    return {
        "reward/within": within,
        "reward/between": between,
        "reward/within_minus_between": difference,
    }


def measuring(options: RunOptions, images_per_prompt: int) -> RunOptions:
    """``options`` whose test rewards are enough for w and b.

    ``between_images`` is added beside ``consistency_score``.
    """
    if images_per_prompt < LEAST_IMAGES:
        raise ConfigError(
            f"--images_per_prompt {images_per_prompt} must be at least {LEAST_IMAGES}"
        )
    test = options.test
    rewards = dict(test.reward_fn or options.train.reward_fn)
    kwargs = options.train.reward_fn_kwargs | test.reward_fn_kwargs
    if not pairs_of(map(short_name, rewards)):
        if "consistency_score" not in rewards:
            names = ", ".join(rewards)
            raise ConfigError(
                f"--images_per_prompt needs the test reward consistency_score, not only {names}"
            )
        rewards["between_images"] = 1.0
        kwargs["between_images"] = kwargs.get("consistency_score", {})
    return replace(options, test=replace(test, reward_fn=rewards, reward_fn_kwargs=kwargs))


def agreement(rows: Sequence[Row], against: Sequence[Row] | None = None) -> dict[str, Agreement]:
    """Agreement of each category of prompts and of all, from an evaluation's rows.

    Args:
        rows: Rows of ``eval_data.jsonl``, several for each prompt.
        against: Rows of another evaluation of the same prompts and seeds: then differences, paired
            by prompt.

    Returns:
        Category → agreement. With several pairs of rewards, for each pair "category, name of the
        within-image reward".
    """
    pairs = pairs_of(rows[0]["rewards"])
    categories = dict.fromkeys(row["category"] for row in rows if row["category"] is not None)
    agreements = {}
    for names in pairs:
        for category in [*categories, "all"]:
            sides = [_of_category(rows, category)]
            if against is not None:
                sides.append(_of_category(against, category))
            key = category if len(pairs) == 1 else f"{category}, {names[0]}"
            agreements[key] = _summary(sides, names)
    return agreements


def _of_category(rows: Sequence[Row], category: str) -> list[Row]:
    return [row for row in rows if category in ("all", row["category"])]


def _summary(sides: Sequence[Sequence[Row]], names: tuple[str, str]) -> Agreement:
    """``sides``: rows of one evaluation, or of two whose difference is computed."""
    missing = 0
    for side in sides:
        for row in side:
            missing += None in [row["rewards"][name] for name in names]
    values = _measures(sides[0], names)
    if len(sides) == 2:
        values = values - _measures(sides[1], names)
    return Agreement(*[interval(column) for column in values.T], missing)


def _measures(rows: Sequence[Row], names: tuple[str, str]) -> np.ndarray:
    """w, b and w − b of each prompt (prompts, 3), means over its images that have the score.

    b and w − b are NaN for prompts that are not open.
    """
    means = by_prompt(rows, names, _mean_of_present)
    is_open = list({row["item_id"]: bool(row.get("open")) for row in rows}.values())
    within = means[:, 0]
    between = np.where(is_open, 1 - means[:, 1], np.nan)
    return np.column_stack([within, between, within - between])


def _mean_of_present(values: np.ndarray, axis: int) -> np.ndarray:
    """As ``np.nanmean``, but without a warning where all values are missing."""
    return np.ma.masked_invalid(values).mean(axis).filled(np.nan)


def table(columns: Mapping[str, Mapping[str, Agreement]]) -> str:
    """Markdown: w, b and w − b with 95 % intervals, for each category and each column.

    A column is an adapter, or the difference of two.
    """
    rows = []
    for category in next(iter(columns.values())):
        for name, column in columns.items():
            measured = column[category]
            intervals = [measured.within, measured.between, measured.within_minus_between]
            num_open = measured.within_minus_between.prompts if intervals[2] else 0
            cells = [value or "–" for value in intervals]
            rows.append([category, name, *cells, num_open, measured.missing])
    head = ["prompts", "", "w (within)", "b (between)", "w − b", "open prompts", "missing"]
    return markdown_table(head, rows)
