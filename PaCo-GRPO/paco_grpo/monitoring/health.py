"""Signs of collapse while it happens: every epoch's row of metrics.jsonl against earlier rows.

The rules are pure functions of the rows that a run has written, so a resumed run judges as if it had never stopped, and
any finished run can be judged again. Limits are ``config.health``.

| sign                                                     | limit                   | likely cause                     | stops |
|----------------------------------------------------------|-------------------------|----------------------------------|-------|
| velocity differs from the base model's on the probe set  | max_velocity_change     | learning rate too high, no KL    | yes   |
| contrast or latent spread against the first epoch        | max_contrast_change     | images burn out or wash out      | yes   |
| brightness against the first epoch                       | max_brightness_change   | images go black, white or tinted | yes   |
| fine detail against the first epoch                      | max_detail_change       | noise, grids, or blur            | yes   |
| distinctness within groups against the first epoch       | min_distinctness        | one picture for every seed       | yes   |
| gradient norm against its median                         | max_gradient_spike      | learning rate, a broken reward   | no    |
| clip share of the later optimizer steps                  | max_clip_share          | learning rate, too many steps    | no    |
| groups whose rewards are all equal                       | max_zero_std_share      | reward saturated or broken       | no    |
| a trained reward rises while an evaluation-only one falls | max_reward_divergence  | the reward is being exploited    | no    |

"Stops" holds if ``train.stop_on_collapse`` is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.monitoring.console import means
from paco_grpo.options import HealthOptions

# Compared with the first epoch as a quotient, and as a difference.
_QUOTIENTS = ("pixel_std", "pixel_detail", "latent_std", "distinctness")
_DIFFERENCES = ("pixel_mean", "latent_mean")
_SPIKE_HISTORY = 20  # epochs behind the median gradient norm
_SPIKE_LEAST = 5  # epochs before it is judged

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # the limit in config.health that it broke
    message: str
    collapse: bool  # the generator itself is damaged: stops the run if train.stop_on_collapse


def against_first(metrics: Row, first: Row) -> dict[str, float]:
    """The samples' statistics relative to the first epoch: ratios, or differences of means.

    Args:
        metrics: The current epoch's metrics, with ``health/<name>``.
        first: Row of the first epoch.

    Returns:
        ``health/<name>_vs_first`` for the names that both have.
    """
    changes = {}
    for name in (*_QUOTIENTS, *_DIFFERENCES):
        now, then = metrics.get(f"health/{name}"), first.get(f"health/{name}")
        if now is not None and then is not None and not (name in _QUOTIENTS and then == 0):
            changes[f"health/{name}_vs_first"] = now / then if name in _QUOTIENTS else now - then
    return changes


def judge_epoch(rows: Sequence[Row], limits: HealthOptions, optimizer_steps: int) -> list[Finding]:
    """Findings on the last of ``rows``.

    Args:
        rows: Training epochs in order, as in metrics.jsonl.
        limits: ``config.health``.
        optimizer_steps: Per epoch, inner epochs included; the first is always on-policy.
    """
    row, found = rows[-1], []

    def find(sign: str, message: str, *, collapse: bool) -> None:
        found.append(Finding(sign, message, collapse))

    change = row.get("health/velocity_change")
    if change is not None and change > limits.max_velocity_change:
        find(
            "max_velocity_change",
            f"on the probe set the velocity differs from the base model's by {change:.2f} of its own size (KL "
            f"{row.get('health/kl_base', math.nan):.2g}): the generator has left its base model. Likely cause: "
            "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0",
            collapse=True,
        )
    damage = (
        "Likely cause: config.train.learning_rate is too high, or a reward that broken images satisfy; look at the last "
        "evaluation's sheet.png"
    )
    for name, limit, words in (
        ("pixel_std", "max_contrast_change", "contrast of the images"),
        ("latent_std", "max_contrast_change", "spread of the latents"),
        ("pixel_detail", "max_detail_change", "fine detail of the images"),
    ):
        factor, most = row.get(f"health/{name}_vs_first"), getattr(limits, limit)
        if factor is not None and not 1 / most <= factor <= most:
            find(limit, f"the {words} is {factor:.2f} times that of the first epoch. {damage}", collapse=True)
    shift = row.get("health/pixel_mean_vs_first", 0.0)
    if abs(shift) > limits.max_brightness_change:
        message = f"the mean brightness moved by {shift:+.2f} (of 1) since the first epoch. {damage}"
        find("max_brightness_change", message, collapse=True)
    share = row.get("health/distinctness_vs_first", math.inf)
    if share < limits.min_distinctness:
        find(
            "min_distinctness",
            f"images of one prompt differ {share:.2f} times as much as in the first epoch: every seed gives the same "
            "picture. Likely cause: the reward prefers one picture; add a reward for prompt or variety, use "
            "config.train.beta > 0, or stop earlier",
            collapse=True,
        )

    norm, before = row.get("train/grad_norm"), [r["train/grad_norm"] for r in rows[:-1] if "train/grad_norm" in r]
    if norm is not None and len(before) >= _SPIKE_LEAST:
        usual = float(np.median(before[-_SPIKE_HISTORY:]))
        if norm > limits.max_gradient_spike * usual:
            find(
                "max_gradient_spike",
                f"the gradient norm is {norm:.3g}, {norm / max(usual, 1e-300):.0f} times its usual {usual:.3g}. Likely "
                "cause: a learning rate that is too high, or rewards of a few samples that are far off",
                collapse=False,
            )
    if optimizer_steps > 1:  # nothing is clipped in the first, on-policy step
        clipped = row.get("train/clip_share", 0.0) * (optimizer_steps / (optimizer_steps - 1))
        if clipped > limits.max_clip_share:
            find(
                "max_clip_share",
                f"{clipped:.0%} of the samples of the later optimizer steps are clipped, so these steps learn little. "
                "Likely cause: the learning rate is too high for config.train.clip_range, or gradient_step_per_epoch "
                "and num_inner_epochs take too many steps on the same samples",
                collapse=False,
            )
    equal = row.get("advantage/zero_std_share", 0.0)
    if equal > limits.max_zero_std_share:
        find(
            "max_zero_std_share",
            f"in {equal:.0%} of the groups all rewards are equal, so there is nothing to learn from them. Likely cause: "
            "the reward is saturated or always answers the same; look at reward/*_std",
            collapse=False,
        )
    return found


def judge_evaluation(rows: Sequence[Row], trained: Iterable[str], limits: HealthOptions) -> list[Finding]:
    """Findings on the last of ``rows``: a trained reward rises significantly while an evaluation-only one falls.

    Args:
        rows: Evaluations in order, as in metrics.jsonl.
        trained: Names of the rewards with a weight in training.
        limits: ``config.health``; ``max_reward_divergence`` in standard errors of the difference to the first
            evaluation, for the rise and for the fall.
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
            collapse=False,
        )
        for name, gain in gains.items()
        if risen and name not in trained and gain < -most
    ]


def changes_since_first(rows: Sequence[Row], trained: Iterable[str]) -> str:
    """One line with every reward's change since the first evaluation, trained ones first; "" for the first evaluation."""
    if len(rows) < 2:
        return ""
    first, last, trained = means(rows[0], "eval/"), means(rows[-1], "eval/"), set(trained)
    parts = []
    for group, is_trained in (("trained", True), ("evaluation-only", False)):
        names = [name for name in last if name in first and (name in trained) == is_trained]
        if names:
            parts.append(f"{group}: {', '.join(f'{name} {last[name] - first[name]:+.4f}' for name in names)}")
    return "; ".join(parts)
