"""What a report says first: what rose, what fell, what was warned, which evaluation was best."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paco_grpo.monitoring.signs import TREND, Finding
from paco_grpo.report.run import RunReport

CLEAR = 2.0  # standard errors of a change that is called one


class Mean(NamedTuple):
    """A mean with its standard error and number of images, NaN where they are unknown."""

    value: float
    error: float
    num_images: float

    def __str__(self) -> str:
        return f"{self.value:.3f}{_error(self.error)}"


@dataclass(frozen=True)
class Change:
    """Of a reward, from the first evaluation to the last, or over the training samples."""

    reward: str
    label: str
    weight: float  # 0: it is only monitored
    before: Mean
    after: Mean

    @property
    def value(self) -> float:
        """By how much the mean changed."""
        return self.after.value - self.before.value

    @property
    def error(self) -> float:
        """Standard error of the change; NaN if one of the means has none."""
        return math.hypot(self.before.error, self.after.error)

    @property
    def direction(self) -> int:
        """1: it rose, −1: it fell, 0: neither is clear."""
        if math.isnan(self.error) or abs(self.value) <= CLEAR * self.error:
            return 0
        return int(math.copysign(1, self.value))

    def __str__(self) -> str:
        change = f"{self.value:+.3f}{_error(self.error)}"
        text = f"{self.label}: {self.before} → {self.after}, so {change}"
        images = images_of(self.before, self.after)
        return f"{text} (n = {images})" if images else text


@dataclass(frozen=True)
class Verdict:
    """What a reader must know.

    Attributes:
        tone: "good", "bad" or "unclear".
        headline: One sentence.
        points: Heading and sentences of each further point.
    """

    tone: str
    headline: str
    points: Sequence[tuple[str, Sequence[str]]]


def changes_of(run: RunReport, label: Callable[[str], str]) -> list[Change]:
    """Changes of the rewards, trained ones first: in the evaluations if there are two.

    Otherwise in the training samples, of the first and the last three epochs that do not overlap.
    """
    changes = []
    has_two = is_evaluated_twice(run)
    for reward, curve in (run.test if has_two else run.train).items():
        size = 1 if has_two else min(TREND, len(curve) // 2)
        if size == 0 or len(curve) < 2:
            continue
        before = mean_of(curve[:size])
        after = mean_of(curve[-size:])
        weight = run.weights.get(reward, 0.0)
        changes.append(Change(reward, label(reward), weight, before, after))
    return sorted(changes, key=lambda change: change.weight == 0)


def evaluated_epochs(run: RunReport) -> list[int]:
    """Epochs of the evaluations, in order."""
    epochs: set[int] = set()
    for curve in run.test.values():
        epochs |= set(map(int, curve[:, 0]))
    return sorted(epochs)


def is_evaluated_twice(run: RunReport) -> bool:
    """Whether evaluations show what changed."""
    return any(len(curve) > 1 for curve in run.test.values())


def mean_of(curve: np.ndarray) -> Mean:
    """Over the epochs of a curve, which have equally many images."""
    _, values, errors, counts = curve.T
    error = math.sqrt((errors**2).sum()) / len(curve)
    if len(curve) > 1:  # epochs have other prompts, which errors over images do not contain
        error = max(error, values.std(ddof=1) / math.sqrt(len(curve)))
    return Mean(float(values.mean()), error, float(counts.sum()))


def means_by_epoch(curve: np.ndarray) -> dict[int, Mean]:
    """The mean of each evaluation of a curve."""
    means = {}
    for place, epoch in enumerate(curve[:, 0]):
        means[int(epoch)] = mean_of(curve[[place]])
    return means


def judge(run: RunReport, label: Callable[[str], str]) -> Verdict:
    """The verdict on ``run``; ``label`` names its rewards."""
    changes = changes_of(run, label)
    trained = []
    gained = []
    lost = []
    guards = []  # monitored rewards that fell
    for change in changes:
        if change.weight:
            trained.append(change)
        elif change.direction < 0:
            guards.append(change)
        if change.weight * change.direction > 0:
            gained.append(change)
        elif change.weight * change.direction < 0:
            lost.append(change)

    parts = []
    if gained:
        parts.append(_moved(gained))
    if lost:
        parts.append(f"{_moved(lost)}, against its training")
    if trained and not parts:
        names = ", ".join(change.label for change in trained)
        parts.append(f"{names} did not change clearly")
    if not trained:
        parts.append("no trained reward can be compared yet")
    if guards:
        parts.append(f"{_moved(guards)} (not trained)")
    headline = ", but ".join(parts)
    if trained and not is_evaluated_twice(run):
        headline += " in the training samples (there are no two evaluations yet)"
    fallen = [change.reward for change in guards]
    for findings in _by_sign(run).values():
        name = findings[0][1].sign.partition("/")[2].removesuffix("_mean")
        if name not in fallen:
            headline += f"; warned {_in_epochs(findings)}: {findings[0][1].meaning}"
    if gained and len(parts) == 1 and not run.findings:
        has_guards = len(trained) < len(changes)
        rest = "nothing fell clearly" if has_guards else "no other reward was measured"
        headline += f"; {rest}, and there is no sign of collapse"
    total = run.config["num_epochs"]
    if run.state == "running":
        headline = f"still running, epoch {run.epochs} of {total}: {headline}"
    elif run.state == "stopped":
        headline = f"stopped after {run.epochs} of {total} epochs: {headline}"
    headline = f"{headline[0].upper()}{headline[1:]}."
    if run.best:
        headline += f" Best evaluation: {after(run.best['epoch'])}."

    tone = "good" if gained else "unclear"
    if lost or guards or run.findings:
        tone = "bad"
    return Verdict(tone, headline, _points(run, changes, label))


def _moved(changes: Sequence[Change]) -> str:
    """What rose and what fell, of changes that are clear."""
    texts = []
    for change in changes[:3]:
        verb = "rose" if change.direction > 0 else "fell"
        values = f"{change.before.value:.3f} to {change.after.value:.3f}"
        images = images_of(change.before, change.after)
        size = f" (n = {images})" if images else ""
        texts.append(f"{change.label} {verb} from {values}{size}")
    if len(changes) > 3:
        texts.append(f"{len(changes) - 3} more")
    return " and ".join(texts)


def _points(
    run: RunReport, changes: Sequence[Change], label: Callable[[str], str]
) -> list[tuple[str, list[str]]]:
    """Each kind of change with its numbers, warnings, the best evaluation, missing scores."""
    points = []
    for heading, direction in (("Rose", 1), ("Fell", -1), ("No clear change", 0)):
        texts = [str(change) for change in changes if change.direction == direction]
        points.append((heading, texts))
    warned = []
    for findings in _by_sign(run).values():
        warned.append(f"{_in_epochs(findings)}: {findings[-1][1].message}")
    points.append(("Warned", warned))
    points.append(("Best evaluation", [_best(run)]))
    missing = []
    for name, share in run.missing.items():
        missing.append(f"{label(name)}: {share:.0%} of the images")
    points.append(("Missing in the last evaluation", missing))
    return [(heading, texts) for heading, texts in points if texts]


def images_of(before: Mean, after: Mean) -> str:
    """How many each mean is over, such as "96" or "96, 90"; empty if unknown."""
    counts: dict[str, None] = {}  # in order, equal ones once
    for mean in (before, after):
        if mean.num_images > 0:
            counts[f"{mean.num_images:.0f}"] = None
    return ", ".join(counts)


def _error(error: float) -> str:
    return "" if math.isnan(error) else f" ± {error:.3f}"


def _best(run: RunReport) -> str:
    """Which evaluation is the best, and what the last one has instead."""
    epochs = evaluated_epochs(run)
    if not epochs:
        return "nothing was evaluated"
    if run.best is None:
        return "no evaluation measures a trained reward"
    epoch = run.best["epoch"]
    text = f"{after(epoch)}, trained reward {run.best['eval/trained_reward']:.3f}"
    if epoch != epochs[-1]:
        text += f"; the last one is {after(epochs[-1])}"
    return f"{text} ({len(epochs)} evaluation{'s' if len(epochs) > 1 else ''})"


def after(epoch: int) -> str:
    """When an evaluation was."""
    return f"after epoch {epoch}" if epoch else "before training"


def _by_sign(run: RunReport) -> dict[str, list[tuple[int, Finding]]]:
    findings: dict[str, list[tuple[int, Finding]]] = {}
    for epoch, finding in run.findings:
        findings.setdefault(finding.sign, []).append((epoch, finding))
    return findings


def _in_epochs(findings: Iterable[tuple[int, Finding]]) -> str:
    """Such as "in epochs 5–8, 10"."""
    spans: list[list[int]] = []
    for epoch, _ in findings:
        if spans and epoch == spans[-1][1] + 1:
            spans[-1][1] = epoch
        else:
            spans.append([epoch, epoch])
    texts = [f"{first}" if first == last else f"{first}–{last}" for first, last in spans]
    several = len(texts) > 1 or "–" in texts[0]
    return f"in epoch{'s' if several else ''} {', '.join(texts)}"
