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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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
        if now is None or then is None or (name in _QUOTIENTS and then == 0):
            continue
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
    found += _base(row, limits)
    found += _samples(row, limits)
    found += _updates(rows, limits, optimizer_steps)
    return found


def _base(row: Row, limits: HealthOptions) -> Iterator[Finding]:
    change = row.get("health/velocity_change")
    if change is not None and change > limits.max_velocity_change:
        yield Finding(
            "max_velocity_change",
            f"on the probe set the velocity differs from the base model's by {change:.2f} of its own size (KL "
            f"{row.get('health/kl_base', math.nan):.2g}): the generator has left its base model. Likely cause: "
            "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0",
            collapse=True,
        )


def _samples(row: Row, limits: HealthOptions) -> Iterator[Finding]:
    for name, limit, words in (
        ("pixel_std", "max_contrast_change", "contrast of the images"),
        ("latent_std", "max_contrast_change", "spread of the latents"),
        ("pixel_detail", "max_detail_change", "fine detail of the images"),
    ):
        factor, most = row.get(f"health/{name}_vs_first"), getattr(limits, limit)
        if factor is not None and not 1 / most <= factor <= most:
            yield Finding(limit, f"the {words} is {factor:.2f} times that of the first epoch. {_DAMAGE}", collapse=True)
    shift = row.get("health/pixel_mean_vs_first")
    if shift is not None and abs(shift) > limits.max_brightness_change:
        yield Finding(
            "max_brightness_change",
            f"the mean brightness moved by {shift:+.2f} (of 1) since the first epoch. {_DAMAGE}",
            collapse=True,
        )
    share = row.get("health/distinctness_vs_first")
    if share is not None and share < limits.min_distinctness:
        yield Finding(
            "min_distinctness",
            f"images of one prompt differ {share:.2f} times as much as in the first epoch: every seed gives the same "
            "picture. Likely cause: the reward prefers one picture; add a reward for prompt or variety, use "
            "config.train.beta > 0, or stop earlier",
            collapse=True,
        )


_DAMAGE = (
    "Likely cause: config.train.learning_rate is too high, or a reward that broken images satisfy; look at the last "
    "evaluation's sheet.png"
)


def _updates(rows: Sequence[Row], limits: HealthOptions, optimizer_steps: int) -> Iterator[Finding]:
    row = rows[-1]
    norm, before = row.get("train/grad_norm"), [r["train/grad_norm"] for r in rows[:-1] if "train/grad_norm" in r]
    if norm is not None and len(before) >= _SPIKE_LEAST:
        usual = float(np.median(before[-_SPIKE_HISTORY:]))
        if norm > limits.max_gradient_spike * usual:
            yield Finding(
                "max_gradient_spike",
                f"the gradient norm is {norm:.3g}, {norm / max(usual, 1e-300):.0f} times its usual {usual:.3g}. Likely "
                "cause: a learning rate that is too high, or rewards of a few samples that are far off",
                collapse=False,
            )
    clipped = row.get("train/clip_share")
    if clipped is not None and optimizer_steps > 1:
        clipped *= optimizer_steps / (optimizer_steps - 1)  # nothing is clipped in the first, on-policy step
        if clipped > limits.max_clip_share:
            yield Finding(
                "max_clip_share",
                f"{clipped:.0%} of the samples of the later optimizer steps are clipped, so these steps learn little. "
                "Likely cause: the learning rate is too high for config.train.clip_range, or gradient_step_per_epoch "
                "and num_inner_epochs take too many steps on the same samples",
                collapse=False,
            )
    equal = row.get("advantage/zero_std_share")
    if equal is not None and equal > limits.max_zero_std_share:
        yield Finding(
            "max_zero_std_share",
            f"in {equal:.0%} of the groups all rewards are equal, so there is nothing to learn from them. Likely cause: "
            "the reward is saturated or always answers the same; look at reward/*_std",
            collapse=False,
        )


# --- trained and evaluation-only rewards ------------------------------------------------------------------------------


def judge_evaluation(rows: Sequence[Row], trained: Iterable[str], limits: HealthOptions) -> list[Finding]:
    """Findings on the last of ``rows``: a trained reward rises significantly while an evaluation-only one falls.

    Args:
        rows: Evaluations in order, as in metrics.jsonl.
        trained: Names of the rewards with a weight in training.
        limits: ``config.health``; ``max_reward_divergence`` in standard errors of the difference to the first
            evaluation, for the rise and for the fall.
    """
    gains = {name: _gain(rows, name) for name in _names(rows[-1])}
    trained, most = set(trained), limits.max_reward_divergence
    risen = {name: gain for name, gain in gains.items() if name in trained and gain is not None and gain > most}
    return [
        Finding(
            "max_reward_divergence",
            f"since the first evaluation {_describe_gains(risen)} rose, but {name}, which is not trained on, fell by {-gain:.1f} "
            "standard errors. Likely cause: the trained reward is being exploited; look at the images, give "
            f"{name} a weight in config.train.reward_fn, or use config.train.beta > 0",
            collapse=False,
        )
        for name, gain in gains.items()
        if risen and name not in trained and gain is not None and gain < -most
    ]


def changes_since_first(rows: Sequence[Row], trained: Iterable[str]) -> str:
    """One line with every reward's change since the first evaluation, trained ones first; "" for the first evaluation."""
    if len(rows) < 2:
        return ""
    trained, names, parts = set(trained), _names(rows[-1]), []
    for group in ("trained", "evaluation-only"):
        chosen = [name for name in names if (name in trained) == (group == "trained")]
        known = [name for name in chosen if _mean(rows[0], name) is not None]
        changes = [f"{name} {_mean(rows[-1], name) - _mean(rows[0], name):+.4f}" for name in known]
        if changes:
            parts.append(f"{group}: {', '.join(changes)}")
    return "; ".join(parts)


def _names(row: Row) -> list[str]:
    return [key[len("eval/") : -len("_mean")] for key in row if key.startswith("eval/") and key.endswith("_mean")]


def _mean(row: Row, name: str) -> float | None:
    return row.get(f"eval/{name}_mean")


def _gain(rows: Sequence[Row], name: str) -> float | None:
    """Rise of a reward since the first evaluation, in standard errors of the difference."""
    first, last = rows[0], rows[-1]
    errors = [row.get(f"eval/{name}_stderr") for row in (first, last)]
    if len(rows) < 2 or None in errors or _mean(first, name) is None or math.hypot(*errors) == 0:
        return None
    return (_mean(last, name) - _mean(first, name)) / math.hypot(*errors)


def _describe_gains(gains: Mapping[str, float]) -> str:
    return ", ".join(f"{name} (by {gain:.1f} standard errors)" for name, gain in gains.items())
