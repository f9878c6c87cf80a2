"""Detects collapse during training: each row of metrics.jsonl is compared with earlier rows.

The rules are pure functions of the rows, so a resumed run judges as if it had never stopped.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.monitoring.console import means

_SPIKE_HISTORY, _SPIKE_LEAST = 20, 5  # epochs behind the median gradient norm, at most and at least
_TREND, _RISE = 5, 0.05  # epochs at the start and end whose mean κ is compared, and the rise of w from which it counts
_DIVERGENCE = 3.0  # standard errors by which a trained reward rises and another one falls

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # the metric that is beyond its limit
    message: str
    collapse: bool = False  # the generator itself is damaged: stops the run with ``train.stop_on_collapse``


def _off(ratio: float, limit: float) -> bool:
    """Beyond the factor ``limit`` up or down."""
    return not 1 / limit <= ratio <= limit


_TOO_FAST = "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0"
_DAMAGE = f"{_TOO_FAST}; or a reward that broken images satisfy; look at the last evaluation's sheet.png"
# Metric, limit, test, message, likely cause.
_COLLAPSES = (
    ("health/velocity_change", 0.75, operator.gt,
     "the generator has left its base model: on the probe set its velocity differs by {:.2f} of the base's", _TOO_FAST),
    ("health/pixel_std_vs_first", 2.0, _off, "images have {:.2f} times the contrast of the first epoch", _DAMAGE),
    ("health/latent_std_vs_first", 2.0, _off, "latents have {:.2f} times the spread of the first epoch", _DAMAGE),
    ("health/pixel_detail_vs_first", 3.0, _off, "images have {:.2f} times the detail of the first epoch", _DAMAGE),
    ("health/pixel_mean_vs_first", 0.25, lambda change, limit: abs(change) > limit,
     "the mean brightness moved by {:+.2f} (of 1)", _DAMAGE),
    ("health/distinctness_vs_first", 0.25, operator.lt,
     "images of one prompt differ {:.2f} times as much as in the first epoch",
     "the reward prefers one picture; add a reward for prompt or variety, use config.train.beta > 0, or stop earlier"),
)  # fmt: skip
_WARNINGS = (
    ("train/grad_norm", 20.0, operator.gt, "the gradient norm is {:.3g} times its median",
     "config.train.learning_rate is too high, or rewards of a few samples are far off"),
    ("train/clip_share", 0.95, operator.gt, "{:.0%} of the samples of the later optimizer steps are clipped",
     "the learning rate is too high for config.train.clip_range, or too many steps on the same samples"),
    ("advantage/zero_std_share", 0.8, operator.gt, "in {:.0%} of the groups all rewards are equal",
     "the reward is saturated or always answers the same; look at reward/*_std"),
    ("reward/kappa", -0.1, operator.lt, "panels of one image agree more, but agreement beyond chance (κ) changed by {:+.2f}",
     "images of a prompt become the same; use between_images as a factor (docs/rewards.md)"),
)  # fmt: skip


def against_first(metrics: Row, first: Row) -> dict[str, float]:
    """``health/<name>_vs_first`` of the samples' statistics: ratios to the first epoch, or differences of means."""
    changes = {}
    for name in ("pixel_std", "latent_std", "pixel_detail", "distinctness", "pixel_mean", "latent_mean"):
        now, then = metrics.get(f"health/{name}"), first.get(f"health/{name}")
        if now is not None and then is not None and name.endswith("_mean"):
            changes[f"health/{name}_vs_first"] = now - then
        elif now is not None and then:
            changes[f"health/{name}_vs_first"] = now / then
    return changes


def judge_epoch(rows: Sequence[Row], optimizer_steps: int) -> list[Finding]:
    """Findings on the last of ``rows``, training epochs in order as in metrics.jsonl.

    ``optimizer_steps`` of an epoch, inner epochs included: the first one clips nothing, because it is on-policy.
    """
    values = dict(rows[-1])
    norm, clipped = values.pop("train/grad_norm", 0.0), values.pop("train/clip_share", 0.0)
    before = [row["train/grad_norm"] for row in rows[:-1] if "train/grad_norm" in row][-_SPIKE_HISTORY:]
    if len(before) >= _SPIKE_LEAST and np.median(before) > 0:
        values["train/grad_norm"] = norm / float(np.median(before))
    if optimizer_steps > 1:
        values["train/clip_share"] = clipped * optimizer_steps / (optimizer_steps - 1)
    values.pop("reward/kappa", None)
    measured = [(row["reward/within"], row["reward/kappa"]) for row in rows if "reward/kappa" in row]
    if len(measured) >= 2 * _TREND:
        rise, change = np.mean(measured[-_TREND:], axis=0) - np.mean(measured[:_TREND], axis=0)
        if rise > _RISE:
            values["reward/kappa"] = change
    return [
        Finding(metric, f"{words.format(values[metric])}. Likely cause: {cause}", rules is _COLLAPSES)
        for rules in (_COLLAPSES, _WARNINGS)
        for metric, limit, is_bad, words, cause in rules
        if metric in values and is_bad(values[metric], limit)
    ]


def judge_evaluation(rows: Sequence[Row], trained: Iterable[str]) -> list[Finding]:
    """Findings on the last of ``rows`` (evaluations): a ``trained`` reward rises significantly while another one falls."""
    first, last = (means(row, "eval/") for row in (rows[0], rows[-1]))
    gains, trained = {}, set(trained)  # in standard errors of the difference
    for name in last:
        error = math.hypot(*(row.get(f"eval/{name}_stderr", math.nan) for row in (rows[0], rows[-1])))
        if name in first and error > 0:
            gains[name] = (last[name] - first[name]) / error
    risen = [name for name, gain in gains.items() if name in trained and gain > _DIVERGENCE]
    return [
        Finding(
            f"eval/{name}_mean",
            f"since the first evaluation {', '.join(risen)} rose, but {name}, which is not trained on, fell by {-gain:.1f} "
            f"standard errors. Likely cause: the trained reward is being exploited; look at the images, give {name} a weight "
            "in config.train.reward_fn, or use config.train.beta > 0",
        )
        for name, gain in gains.items()
        if risen and name not in trained and gain < -_DIVERGENCE
    ]
