"""Detects collapse: rules over the rows of metrics.jsonl, so a resumed run judges as if it had never stopped."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.monitoring.console import means

_TREND, _RISE = (
    5,
    0.05,
)  # epochs at start and end whose mean κ is compared; rise of w from which it counts
_DIVERGENCE = 3.0  # standard errors by which a trained reward rises and another one falls

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # a metric
    message: str
    collapse: bool = (
        False  # the generator itself is damaged: stops the run with ``train.stop_on_collapse``
    )


_TOO_FAST = (
    "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0"
)
# metric, test, message, likely cause, whether the generator is damaged; chosen on planted hacks (docs/recovery.md)
_SIGNS = (
    ("health/velocity_change", lambda x: x > 0.75,
     "the generator has left its base model: on the probe set its velocity differs by {:.2f} of the base's", _TOO_FAST, True),
    ("health/latent_std_vs_first", lambda x: not 0.5 <= x <= 2, "latents have {:.2f} times the spread of the first epoch",
     f"{_TOO_FAST}; or a reward that broken images satisfy; look at the last evaluation's sheet.png", True),
    ("health/distinctness_vs_first", lambda x: x < 0.25,
     "images of one prompt differ {:.2f} times as much as in the first epoch",
     "the reward prefers one picture; add a reward for prompt or variety, use config.train.beta > 0, or stop earlier", True),
    ("reward/kappa", lambda x: x < -0.1, "panels of one image agree more, but agreement beyond chance (κ) changed by {:+.2f}",
     "images of a prompt become the same; use between_images as a factor (docs/rewards.md)", False),
)  # fmt: skip


def against_first(metrics: Row, first: Row) -> dict[str, float]:
    """``health/*_vs_first``: ratios to the first epoch."""
    pairs = {
        key: (metrics.get(key), first.get(key))
        for key in ("health/latent_std", "health/distinctness")
    }
    return {
        f"{key}_vs_first": now / then
        for key, (now, then) in pairs.items()
        if now is not None and then
    }


def judge_epoch(rows: Sequence[Row]) -> list[Finding]:
    """Findings on the last of ``rows``, all training epochs of metrics.jsonl."""
    values = dict(rows[-1])
    values.pop("reward/kappa", None)
    measured = [
        (row["reward/within"], row["reward/kappa"]) for row in rows if "reward/kappa" in row
    ]
    if len(measured) >= 2 * _TREND:
        rise, change = np.mean(measured[-_TREND:], axis=0) - np.mean(measured[:_TREND], axis=0)
        if rise > _RISE:
            values["reward/kappa"] = change
    return [
        Finding(metric, f"{words.format(values[metric])}. Likely cause: {cause}", damaged)
        for metric, is_bad, words, cause, damaged in _SIGNS
        if metric in values and is_bad(values[metric])
    ]


def judge_evaluation(rows: Sequence[Row], trained: Iterable[str]) -> list[Finding]:
    """Findings on the last of ``rows`` (evaluations): a ``trained`` reward rises significantly while another one falls."""
    first, last = (means(row, "eval/") for row in (rows[0], rows[-1]))
    gains, trained = {}, set(trained)  # in standard errors of the difference
    for name in last:
        error = math.hypot(
            *(row.get(f"eval/{name}_stderr", math.nan) for row in (rows[0], rows[-1]))
        )
        if name in first and error > 0:
            gains[name] = (last[name] - first[name]) / error
    risen = [name for name, gain in gains.items() if name in trained and gain > _DIVERGENCE]
    return [
        Finding(
            f"eval/{name}_mean",
            f"since the first evaluation {', '.join(risen)} rose, but {name}, which is not trained on, fell by {-gain:.1f} "
            "standard errors. Likely cause: the trained reward is being exploited; look at the images, give it a "
            "weight in config.train.reward_fn, or use config.train.beta > 0",
        )
        for name, gain in gains.items()
        if risen and name not in trained and gain < -_DIVERGENCE
    ]
