"""Means over the prompts of an evaluation, with confidence intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats

from paco_grpo.evaluation.pictures import markdown_table

LEAST_PROMPTS = 10  # of an interval: fewer prompts do not show how much prompts differ
Row = Mapping[str, Any]  # of eval_data.jsonl


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % confidence interval; None from fewer than ten prompts."""

    mean: float
    low: float | None
    high: float | None
    prompts: int

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def interval(values: np.ndarray) -> Interval | None:
    """Mean of ``values`` (prompts,) with Efron's percentile interval; NaN = missing.

    None if all are missing. Always the same prompts are drawn.
    """
    values = values[~np.isnan(values)]
    count = len(values)
    if count == 0:
        return None
    mean = float(values.mean())
    if count < LEAST_PROMPTS:
        return Interval(mean, None, None, count)
    resampled = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=10_000, batch=1000, method="percentile", rng=0
    )
    low, high = resampled.confidence_interval
    return Interval(mean, float(low), float(high), count)


def by_prompt(rows: Sequence[Row], rewards: Sequence[str], mean: Callable = np.mean) -> np.ndarray:
    """Means of each prompt's images (prompts, rewards), prompts in order of first appearance.

    A missing score is NaN: ``np.mean`` leaves its prompt out, ``np.nanmean`` its image.
    """
    scores: dict[int, list[list[float | None]]] = {}  # item → images → rewards
    for row in rows:
        values = [row["rewards"][name] for name in rewards]
        scores.setdefault(row["item_id"], []).append(values)
    means = [mean(np.array(values, float), axis=0) for values in scores.values()]
    return np.array(means).reshape(-1, len(rewards))


def reward_intervals(
    rows: Sequence[Row], against: Sequence[Row] | None = None
) -> dict[str, Interval | None]:
    """The interval over prompts of each reward, or of its difference ``rows`` − ``against``.

    A difference is paired by prompt. A prompt that lacks a score, on either side, is left out.
    """
    names = list(rows[0]["rewards"])
    values = by_prompt(rows, names)
    if against is not None:
        values = values - by_prompt(against, names)
    return {name: interval(column) for name, column in zip(names, values.T, strict=True)}


def markdown(columns: Mapping[str, Mapping[str, Interval | None]]) -> str:
    """Markdown, a row for each reward: mean and 95 % interval in each column, and the prompts."""
    rows = []
    few = False
    for name in next(iter(columns.values())):
        cells = []
        counts = set()
        for column in columns.values():
            measured = column[name]
            cells.append(measured or "–")
            counts.add(measured.prompts if measured else 0)
        few |= min(counts) < LEAST_PROMPTS
        rows.append([name, *cells, ", ".join(map(str, sorted(counts)))])
    table = markdown_table(["reward", *columns, "prompts"], rows)
    if few:
        table += f"\nFewer than {LEAST_PROMPTS} prompts are too few for a 95 % interval.\n"
    return table
