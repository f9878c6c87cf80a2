"""Means over the prompts of an evaluation, with confidence intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats
from typing_extensions import override

from paco_grpo.monitoring.metrics import by_prompt, pairs_of, within_between

LEAST_PROMPTS = 10  # of an interval: fewer prompts do not show how much prompts differ
Row = Mapping[str, Any]  # of eval_data.jsonl


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % confidence interval; None from fewer than ten prompts."""

    mean: float
    low: float | None
    high: float | None
    prompts: int

    @override
    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def interval(values: np.ndarray) -> Interval | None:
    """Mean of ``values`` (prompts,) with Efron's percentile interval; NaN = missing.

    None if all are missing. The resampling has a fixed seed.
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


def prompt_means(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The mean of each prompt's images, (prompts,), by reward; NaN where an image lacks a score.

    With rewards that measure w and b, also these and w − b of open prompts (see ``metrics``).
    """
    names = list(rows[0]["rewards"])
    item_ids = np.array([row["item_id"] for row in rows])
    is_open = np.array([row["open"] for row in rows], bool)
    scores = np.array([list(row["rewards"].values()) for row in rows], float)
    means = dict(zip(names, by_prompt(scores, item_ids).T, strict=True))
    for pair in pairs_of(names):
        prefix = pair[1].removesuffix("between_images")
        columns = [names.index(name) for name in pair]
        for name, values in within_between(scores[:, columns], item_ids, is_open).items():
            means[f"{prefix}{name}"] = values
    return means


def intervals(
    rows: Sequence[Row], against: Sequence[Row] | None = None
) -> dict[str, Interval | None]:
    """The interval over prompts of each measure, or of its difference ``rows`` − ``against``.

    A difference is paired by prompt. A prompt that lacks a score, on either side, is left out.
    """
    means = prompt_means(rows)
    if against is not None:
        others = prompt_means(against)
        for name in means:
            means[name] = means[name] - others[name]
    return {name: interval(values) for name, values in means.items()}


def markdown(columns: Mapping[str, Mapping[str, Interval | None]]) -> str:
    """Markdown, a row for each measure: mean and 95 % interval in each column, and the prompts."""
    rows = [["", *columns, "prompts"], ["---"] * (len(columns) + 2)]
    few = False
    for name in next(iter(columns.values())):
        measured = [column[name] for column in columns.values()]
        counts = {interval.prompts if interval else 0 for interval in measured}
        few |= min(counts) < LEAST_PROMPTS
        cells = [str(interval or "–") for interval in measured]
        rows.append([name, *cells, ", ".join(map(str, sorted(counts)))])
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    if few:
        lines += ["", f"Fewer than {LEAST_PROMPTS} prompts are too few for a 95 % interval."]
    return "\n".join(lines) + "\n"
