"""Signs of collapse: rules over the rows of metrics.jsonl.

A resumed run judges as if it had never stopped, and a report judges what a run has left.
"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from paco_grpo.monitoring.metrics import means, rewards_line

logger = logging.getLogger(__name__)

TREND = 3  # epochs of a mean
DIVERGENCE = 3.0  # standard errors by which a trained reward rises and another one falls

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One sign that a run is going wrong."""

    sign: str  # a metric
    meaning: str  # in a few words
    message: str
    # The generator is damaged: this stops the run with ``train.stop_on_collapse``.
    collapse: bool = False


@dataclass(frozen=True)
class Sign:
    """A metric with its limits, which were chosen on planted hacks (docs/recovery.md)."""

    metric: str
    meaning: str  # in a few words
    message: str  # with the value in braces
    cause: str
    collapse: bool
    lowest: float = -math.inf
    highest: float = math.inf


_TOO_FAST = (
    "config.train.learning_rate is too high; lower it, or add a KL term with config.train.beta > 0"
)
SIGNS = (
    Sign(
        metric="health/velocity_change",
        meaning="the generator is far from the base model",
        highest=0.75,
        message="the generator has left the reference: on the probe set its velocity differs by "
        "{:.2f} of the reference's",
        cause=_TOO_FAST,
        collapse=True,
    ),
    Sign(
        metric="health/latent_std_vs_first",
        meaning="images burn out or lose their content",
        lowest=0.5,
        highest=2,
        message="latents have {:.2f} times the spread of the first epoch",
        cause=f"{_TOO_FAST}; or broken images get a high reward; look at the last evaluation's "
        "sheet.png",
        collapse=True,
    ),
    Sign(
        metric="health/distinctness_vs_first",
        meaning="the images of a prompt are almost the same picture",
        lowest=0.25,
        message="images of one prompt differ {:.2f} times as much as in the first epochs",
        cause="the reward prefers one picture; add a reward for prompt or variety, use "
        "config.train.beta > 0, or stop earlier",
        collapse=True,
    ),
    Sign(
        metric="health/diversity_vs_first",
        meaning="the images of an open prompt become alike",
        lowest=0.5,
        message="images of an open prompt become alike: their diversity 1 − b has fallen to "
        "{:.2f} times its value in the first epochs",
        cause="images of a prompt become the same; use between_images as a factor "
        "(docs/rewards.md)",
        collapse=False,
    ),
)


def against_first(rows: Sequence[Row]) -> dict[str, float]:
    """``health/*_vs_first`` of the last of ``rows``, all training epochs: means of three epochs.

    An epoch has few prompts, and other ones than the epochs before it. So what differs between
    prompts is compared with the mean of the first three epochs, from the fourth on: how much the
    images of a prompt differ in their pixels (distinctness) and for the judge (diversity, 1 − b).
    The spread of latents hardly depends on prompts. It is compared with the first epoch alone,
    which a generator that breaks in the second one has not spoiled.
    """
    ratios = {}
    spreads = _finite(rows, "health/latent_std")
    if spreads and spreads[0]:
        ratios["health/latent_std_vs_first"] = float(np.mean(spreads[-TREND:]) / spreads[0])
    differences = {
        "health/distinctness_vs_first": _finite(rows, "health/distinctness"),
        "health/diversity_vs_first": [1 - b for b in _finite(rows, "reward/between")],
    }
    for name, values in differences.items():
        if len(values) > TREND and any(values[:TREND]):
            ratios[name] = float(np.mean(values[-TREND:]) / np.mean(values[:TREND]))
    return ratios


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    values = []
    for row in rows:
        if math.isfinite(row.get(name, math.nan)):
            values.append(row[name])
    return values


def judge_epoch(metrics: Row) -> list[Finding]:
    """Findings on a training epoch's row of metrics.jsonl."""
    findings = []
    # NaN compares false with every limit.
    not_finite = []
    for name, value in metrics.items():
        if name.startswith("health/") and not math.isfinite(value):
            not_finite.append(name)
    if not_finite:
        message = (
            f"{', '.join(not_finite)} not finite: the generator's images or velocities are NaN "
            f"or infinite. Likely cause: {_TOO_FAST}; or damaged weights or optimizer moments: "
            "resume from an earlier checkpoint"
        )
        findings.append(Finding(not_finite[0], "numbers are not finite", message, True))
    for sign in SIGNS:
        value = metrics.get(sign.metric, math.nan)
        if math.isfinite(value) and not sign.lowest <= value <= sign.highest:
            message = f"{sign.message.format(value)}. Likely cause: {sign.cause}"
            findings.append(Finding(sign.metric, sign.meaning, message, sign.collapse))
    return findings


def judge_scores(rows: Sequence[Row]) -> list[Finding]:
    """A finding if the last of ``rows``, and no earlier one, is an epoch without an advantage.

    The images of each prompt then have equal scores, such as 0. ``rows`` are training epochs.
    """
    flat = [
        row.get("advantage/mean_abs") == 0 and row["advantage/dropped_share"] < 1 for row in rows
    ]
    if flat[-1:] != [True] or any(flat[:-1]):
        return []
    message = (
        f"the images of each prompt have equal scores (means: {rewards_line(rows[-1], 'reward/')}),"
        " so nothing could be learned from them. Look at the pictures and scores of an evaluation "
        "(sheet.png, eval_data.jsonl): does the reward suit the prompts, and does the generator "
        "reach it at all? More images, config.sample.num_images_per_prompt, differ more"
    )
    return [Finding("advantage/mean_abs", "equal scores, nothing to learn from", message)]


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
        key = f"{group}{name}_stderr"
        error = math.hypot(rows[0].get(key, math.nan), rows[-1].get(key, math.nan))
        if name in first and error > 0:
            gains[name] = (last[name] - first[name]) / error
    risen = []
    for name, gain in gains.items():
        if name in trained and gain > DIVERGENCE:
            risen.append(name)
    if not risen:
        return []
    findings = []
    for name, gain in gains.items():
        if name not in trained and gain < -DIVERGENCE:
            message = (
                f"since the first evaluation {', '.join(risen)} rose, but {name}, which is not "
                f"trained on, fell by {-gain:.1f} standard errors. Likely cause: the trained "
                "reward is being exploited; look at the images, give it a weight in "
                "config.train.reward_fn, or use config.train.beta > 0"
            )
            meaning = f"{name} fell while {', '.join(risen)} rose"
            findings.append(Finding(f"{group}{name}_mean", meaning, message))
    return findings


def with_ratios(epochs: Sequence[Row]) -> list[Row]:
    """Training ``epochs`` as they were judged, by today's rules also those of an older run."""
    judged = []
    for number, row in enumerate(epochs, start=1):
        metrics = {}
        for name, value in row.items():
            if not name.endswith("_vs_first"):
                metrics[name] = value
        metrics |= dict.fromkeys(row.get("not_finite", ()), math.nan)
        judged.append(metrics | against_first(epochs[:number]))
    return judged


def findings_of_run(
    rows: Sequence[Row], trained: Mapping[str, Collection[str]]
) -> list[tuple[int, Finding]]:
    """What a run warned of, with the epoch, in order.

    Args:
        rows: Of metrics.jsonl.
        trained: As for ``judge_evaluation``, by ``group``.
    """
    epochs = []
    evaluations = []
    for row in rows:
        if row["phase"] == "train":
            epochs.append(row)
        elif row["phase"] == "eval":
            evaluations.append(row)
    findings = []
    for number, row in enumerate(with_ratios(epochs), start=1):
        for finding in judge_epoch(row) + judge_scores(epochs[:number]):
            findings.append((row["epoch"], finding))
    for number, row in enumerate(evaluations, start=1):
        for group, names in trained.items():
            for finding in judge_evaluation(evaluations[:number], names, group):
                findings.append((row["epoch"], finding))
    return sorted(findings, key=itemgetter(0))


def warn(findings: Iterable[Finding], when: str = "") -> None:
    """Log ``findings``, after the words ``when``."""
    for finding in findings:
        logger.warning("%s%s (%s in metrics.jsonl)", when, finding.message, finding.sign)
