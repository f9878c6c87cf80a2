"""Pairwise accuracy on EditReward-Bench: how often the better edit gets the higher score."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paco_judge.questions import EDIT_DIMENSIONS

GROUPS = {
    "object": ("subject-add", "subject-remove", "subject-replace"),
    "appearance": ("color_alter", "material_alter", "style_change", "tone_transfer"),
    "scene": ("background_change", "extract"),
    "advanced": ("ps_human", "text_change", "motion_change", "compose"),
}
OTHER = "other"  # task types of a data set of one's own


@dataclass(frozen=True)
class Accuracy:
    """Shares in [0, 1] of `pairs` (at least one) in which the better edit scores higher, or at least as high."""

    pairs: int
    strict: float
    lenient: float

    @property
    def ties(self) -> int:
        """Pairs with equal scores."""
        return round((self.lenient - self.strict) * self.pairs)


@dataclass(frozen=True)
class Summary:
    """One dimension. `average` counts every pair alike; `task_mean`, (strict, lenient), every task type."""

    tasks: Mapping[str, Accuracy]
    groups: Mapping[str, Accuracy]
    average: Accuracy
    task_mean: tuple[float, float]


def pairwise_accuracy(scores: Sequence[Sequence[float]]) -> Accuracy:
    """Strict (>) and lenient (≥) accuracy of (n, 2) scores, the better edit's first. Raises ValueError for n = 0."""
    if not scores:
        raise ValueError("there are no pairs to take an accuracy of")
    strict = sum(better > worse for better, worse in scores)
    lenient = sum(better >= worse for better, worse in scores)
    return Accuracy(len(scores), strict / len(scores), lenient / len(scores))


def group_of(task_type: str) -> str:
    """The group of a task type; `other` for one that EditReward-Bench does not have."""
    return next((group for group, tasks in GROUPS.items() if task_type in tasks), OTHER)


def summarise(rows: Iterable[Mapping[str, Any]]) -> dict[str, Summary]:
    """Accuracies by dimension (those that have rows, in `EDIT_DIMENSIONS`' order).

    Args:
        rows: results with `task_type`, `dimension` and `scores` (2,), the better edit's first.
    """
    by_dimension: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_dimension.setdefault(row["dimension"], []).append(row)
    return {name: _summary(by_dimension[name]) for name in EDIT_DIMENSIONS if name in by_dimension}


def _summary(rows: list[Mapping[str, Any]]) -> Summary:
    by_task: dict[str, list] = {}
    by_group: dict[str, list] = {}
    for row in rows:
        by_task.setdefault(row["task_type"], []).append(row["scores"])
        by_group.setdefault(group_of(row["task_type"]), []).append(row["scores"])
    known = [task for tasks in GROUPS.values() for task in tasks]
    order = [*known, *sorted(set(by_task) - set(known))]
    tasks = {task: pairwise_accuracy(by_task[task]) for task in order if task in by_task}
    groups = {group: pairwise_accuracy(by_group[group]) for group in (*GROUPS, OTHER) if group in by_group}
    task_mean = tuple(sum(getattr(one, kind) for one in tasks.values()) / len(tasks) for kind in ("strict", "lenient"))
    return Summary(tasks, groups, pairwise_accuracy([row["scores"] for row in rows]), task_mean)
