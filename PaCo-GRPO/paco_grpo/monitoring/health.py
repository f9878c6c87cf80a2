"""Detects collapse during training: each row of metrics.jsonl is compared with earlier rows.

The rules are pure functions of the rows, so a resumed run judges as if it had never stopped. Limits are ``config.health``.
A finding with ``collapse`` stops the run if ``train.stop_on_collapse`` is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.monitoring.console import means
from paco_grpo.options import HealthOptions

# Compared with the first epoch as a ratio: the metric, its limit, and what it measures.
_RATIOS = {
    "pixel_std": ("max_contrast_change", "contrast of the images"),
    "latent_std": ("max_contrast_change", "spread of the latents"),
    "pixel_detail": ("max_detail_change", "fine detail of the images"),
}
_SPIKE_HISTORY, _SPIKE_LEAST = 20, 5  # epochs behind the median gradient norm, at most and at least
_DAMAGE = (
    "Likely cause: config.train.learning_rate is too high, or a reward that broken images satisfy; look at the last "
    "evaluation's sheet.png"
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # the limit in config.health that was exceeded
    message: str
    collapse: bool = False  # the generator itself is damaged


def against_first(metrics: Row, first: Row) -> dict[str, float]:
    """``health/<name>_vs_first`` of the samples' statistics: ratios to the first epoch, or differences of means."""
    changes = {}
    for name in (*_RATIOS, "distinctness", "pixel_mean", "latent_mean"):
        now, then = metrics.get(f"health/{name}"), first.get(f"health/{name}")
        if None in (now, then):
            continue
        if name.endswith("_mean"):
            changes[f"health/{name}_vs_first"] = now - then
        elif then != 0:
            changes[f"health/{name}_vs_first"] = now / then
    return changes


def judge_epoch(rows: Sequence[Row], limits: HealthOptions, optimizer_steps: int) -> list[Finding]:
    """Findings on the last of ``rows``.

    Args:
        rows: Training epochs in order, as in metrics.jsonl.
        limits: ``config.health``.
        optimizer_steps: Per epoch, inner epochs included. The first one clips nothing, because it is on-policy.
    """
    return [*_collapses(rows[-1], limits), *_warnings(rows, limits, optimizer_steps)]


def _collapses(row: Row, limits: HealthOptions) -> Iterator[Finding]:
    change = row.get("health/velocity_change", 0.0)
    if change > limits.max_velocity_change:
        yield Finding(
            "max_velocity_change",
            f"the generator has left its base model: on the probe set its velocity differs by {change:.2f} of the base's "
            f"(KL {row.get('health/kl_base', math.nan):.2g}). Likely cause: config.train.learning_rate is too high; lower it, "
            "or add a KL term with config.train.beta > 0",
            collapse=True,
        )
    for name, (limit, words) in _RATIOS.items():
        ratio, most = row.get(f"health/{name}_vs_first", 1.0), getattr(limits, limit)
        if not 1 / most <= ratio <= most:
            yield Finding(limit, f"the {words} is {ratio:.2f} times that of the first epoch. {_DAMAGE}", collapse=True)
    shift = row.get("health/pixel_mean_vs_first", 0.0)
    if abs(shift) > limits.max_brightness_change:
        message = f"the mean brightness moved by {shift:+.2f} (of 1) since the first epoch. {_DAMAGE}"
        yield Finding("max_brightness_change", message, collapse=True)
    share = row.get("health/distinctness_vs_first", math.inf)
    if share < limits.min_distinctness:
        yield Finding(
            "min_distinctness",
            f"images of one prompt differ {share:.2f} times as much as in the first epoch. Likely cause: the reward prefers "
            "one picture; add a reward for prompt or variety, use config.train.beta > 0, or stop earlier",
            collapse=True,
        )


def _warnings(rows: Sequence[Row], limits: HealthOptions, optimizer_steps: int) -> Iterator[Finding]:
    row = rows[-1]
    norm, before = row.get("train/grad_norm", 0.0), [r["train/grad_norm"] for r in rows[:-1] if "train/grad_norm" in r]
    usual = float(np.median(before[-_SPIKE_HISTORY:])) if len(before) >= _SPIKE_LEAST else math.inf
    if norm > limits.max_gradient_spike * usual:
        yield Finding(
            "max_gradient_spike",
            f"the gradient norm is {norm:.3g}, usually {usual:.3g}. Likely cause: a learning rate that is too high, or "
            "rewards of a few samples that are far off",
        )
    clipped = row.get("train/clip_share", 0.0) * optimizer_steps / max(1, optimizer_steps - 1)
    if optimizer_steps > 1 and clipped > limits.max_clip_share:
        yield Finding(
            "max_clip_share",
            f"{clipped:.0%} of the samples of the later optimizer steps are clipped. Likely cause: the learning rate is too "
            "high for config.train.clip_range, or gradient_step_per_epoch and num_inner_epochs take too many steps on the "
            "same samples",
        )
    equal = row.get("advantage/zero_std_share", 0.0)
    if equal > limits.max_zero_std_share:
        yield Finding(
            "max_zero_std_share",
            f"in {equal:.0%} of the groups all rewards are equal, so nothing is learned from them. Likely cause: the reward "
            "is saturated or always answers the same; look at reward/*_std",
        )


def judge_evaluation(rows: Sequence[Row], trained: Iterable[str], limits: HealthOptions) -> list[Finding]:
    """Findings on the last of ``rows``: a trained reward rises significantly while an evaluation-only one falls.

    Args:
        rows: Evaluations in order, as in metrics.jsonl.
        trained: Names of the rewards with a weight in training.
        limits: ``max_reward_divergence`` is in standard errors of the difference to the first evaluation.
    """
    first, last = (means(row, "eval/") for row in (rows[0], rows[-1]))
    gains = {}  # in standard errors of the difference
    for name in last:
        error = math.hypot(*(row.get(f"eval/{name}_stderr", math.nan) for row in (rows[0], rows[-1])))
        if name in first and error > 0:
            gains[name] = (last[name] - first[name]) / error
    trained, most = set(trained), limits.max_reward_divergence
    risen = [f"{name} (by {gain:.1f} standard errors)" for name, gain in gains.items() if name in trained and gain > most]
    return [
        Finding(
            "max_reward_divergence",
            f"since the first evaluation {', '.join(risen)} rose, but {name}, which is not trained on, fell by {-gain:.1f} "
            "standard errors. Likely cause: the trained reward is being exploited; look at the images, give "
            f"{name} a weight in config.train.reward_fn, or use config.train.beta > 0",
        )
        for name, gain in gains.items()
        if risen and name not in trained and gain < -most
    ]


def changes_since_first(rows: Sequence[Row], trained: Iterable[str]) -> str:
    """One line with every reward's change since the first evaluation, trained ones first; "" for the first evaluation."""
    first, last, trained = means(rows[0], "eval/"), means(rows[-1], "eval/"), set(trained)
    parts = []
    for group, is_trained in (("trained", True), ("evaluation-only", False)):
        names = [name for name in last if name in first and (name in trained) == is_trained]
        if names and len(rows) > 1:
            parts.append(f"{group}: {', '.join(f'{name} {last[name] - first[name]:+.4f}' for name in names)}")
    return "; ".join(parts)
