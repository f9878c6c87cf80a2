"""Detects collapse by rules over the rows of metrics.jsonl.

A resumed run judges as if it had never stopped.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paco_grpo.monitoring.console import means

_TREND = 3  # epochs at start and end whose mean diversity is compared
_DIVERGENCE = 3.0  # standard errors by which a trained reward rises and another one falls

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # a metric
    message: str
    # The generator is damaged: this stops the run with ``train.stop_on_collapse``.
    collapse: bool = False


@dataclass(frozen=True)
class Sign:
    """A metric with its limits, which were chosen on planted hacks (docs/recovery.md)."""

    metric: str
    message: str  # with the value in braces
    cause: str
    collapse: bool
    lowest: float = -math.inf
    highest: float = math.inf


_TOO_FAST = (
    "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0"
)
_SIGNS = (
    Sign(
        metric="health/velocity_change",
        highest=0.75,
        message="the generator has left the reference: on the probe set its velocity differs by "
        "{:.2f} of the reference's",
        cause=_TOO_FAST,
        collapse=True,
    ),
    Sign(
        metric="health/latent_std_vs_first",
        lowest=0.5,
        highest=2,
        message="latents have {:.2f} times the spread of the first epoch",
        cause=f"{_TOO_FAST}; or a reward that broken images satisfy; look at the last evaluation's "
        "sheet.png",
        collapse=True,
    ),
    Sign(
        metric="health/distinctness_vs_first",
        lowest=0.25,
        message="images of one prompt differ {:.2f} times as much as in the first epoch",
        cause="the reward prefers one picture; add a reward for prompt or variety, use "
        "config.train.beta > 0, or stop earlier",
        collapse=True,
    ),
    Sign(
        metric="health/diversity_vs_first",
        lowest=0.7,
        message="different images of an open prompt agree more: {:.2f} of the first epochs' "
        "diversity 1 − b is left",
        cause="images of a prompt become the same; use between_images as a factor "
        "(docs/rewards.md)",
        collapse=False,
    ),
)


def against_first(rows: Sequence[Row]) -> dict[str, float]:
    """``health/*_vs_first`` of the last of ``rows``, all training epochs: ratios to the first.

    Diversity is 1 − b, by few open prompts an epoch, so that means of some epochs are compared.
    """
    first = rows[0]
    last = rows[-1]
    ratios = {}
    for key in ("health/latent_std", "health/distinctness"):
        if key in last and first.get(key):
            ratios[f"{key}_vs_first"] = last[key] / first[key]
    diversities = [1 - row["reward/between"] for row in rows if "reward/between" in row]
    if any(diversities[:_TREND]):
        first_mean = np.mean(diversities[:_TREND])
        ratios["health/diversity_vs_first"] = float(np.mean(diversities[-_TREND:]) / first_mean)
    return ratios


def judge_epoch(metrics: Row) -> list[Finding]:
    """Findings on a training epoch's row of metrics.jsonl."""
    findings = []
    # They compare false with every limit.
    not_finite = []
    for name, value in metrics.items():
        if name.startswith("health/") and not math.isfinite(value):
            not_finite.append(name)
    if not_finite:
        message = (
            f"{', '.join(not_finite)} not finite: the generator makes images or velocities that "
            f"are no numbers. Likely cause: {_TOO_FAST}; or damaged weights or optimizer moments: "
            "resume from an earlier checkpoint"
        )
        findings.append(Finding(not_finite[0], message, collapse=True))
    for sign in _SIGNS:
        value = metrics.get(sign.metric, math.nan)
        if math.isfinite(value) and not sign.lowest <= value <= sign.highest:
            message = f"{sign.message.format(value)}. Likely cause: {sign.cause}"
            findings.append(Finding(sign.metric, message, sign.collapse))
    return findings


def judge_evaluation(
    rows: Sequence[Row], trained: Iterable[str], group: str = "eval/"
) -> list[Finding]:
    """Whether a ``trained`` reward rose significantly while another one fell.

    ``rows`` are evaluations; the last is compared with the first. The names of their metrics begin
    with ``group``: those of one prompt set, or of all.
    """
    trained = set(trained)
    first = means(rows[0], group)
    last = means(rows[-1], group)
    gains = {}  # in standard errors of the difference
    for name in last:
        errors = [row.get(f"{group}{name}_stderr", math.nan) for row in (rows[0], rows[-1])]
        error = math.hypot(*errors)
        if name in first and error > 0:
            gains[name] = (last[name] - first[name]) / error
    risen = [name for name, gain in gains.items() if name in trained and gain > _DIVERGENCE]
    if not risen:
        return []
    findings = []
    for name, gain in gains.items():
        if name not in trained and gain < -_DIVERGENCE:
            message = (
                f"since the first evaluation {', '.join(risen)} rose, but {name}, which is not "
                f"trained on, fell by {-gain:.1f} standard errors. Likely cause: the trained "
                "reward is being exploited; look at the images, give it a weight in "
                "config.train.reward_fn, or use config.train.beta > 0"
            )
            findings.append(Finding(f"{group}{name}_mean", message))
    return findings
