"""How much people agree with each other and with themselves (agreement.json)."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import rankdata

from paco_reward.ranking.people import Slot
from paco_reward.ranking.tasks import EDIT, EDIT_LABELS, PAIR, SET

Answers = Mapping[Slot, Mapping[str, Any]]  # of one person: rows of their file


def ranks(answer: Mapping[str, Any]) -> dict[str, float]:
    """The rank of each candidate of a set, 1 is best; equal ones have the mean of their ranks."""
    names = answer["rank_images"]
    places = dict(zip(names, range(len(names)), strict=True))
    for equal in answer.get("equal", []):
        for name in equal:
            places[name] = places[equal[0]]
    return dict(zip(places, rankdata(list(places.values())).tolist(), strict=True))


def kendalls_w(ranked: Sequence[Mapping[str, float]]) -> float | None:
    """Kendall's coefficient of concordance of several people's ``ranks`` of one set.

    1: all agree; 0: no more than by chance. With his correction for equal ranks (Kendall 1962,
    Rank Correlation Methods, chapter 6). None: all candidates are equal to all people.
    """
    names = sorted(ranked[0])
    rows = []
    for person in ranked:
        rows.append([person[name] for name in names])
    table = np.array(rows)
    people, count = table.shape
    squares = ((table.sum(axis=0) - people * (count + 1) / 2) ** 2).sum()
    ties = 0.0
    for row in table:
        sizes = np.unique(row, return_counts=True)[1]
        ties += float((sizes**3 - sizes).sum())
    largest = people**2 * (count**3 - count) - people * ties
    return None if largest == 0 else float(12 * squares / largest)


def comparisons(kind: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[bool]:
    """Where two answers to one task are the same.

    Of sets: for each two candidates, whether their order (or that they are equal) is the same.
    Of pairs and edits: for each label that both gave.
    """
    if kind != SET:
        labels = ("label",) if kind == PAIR else EDIT_LABELS
        same = []
        for label in labels:
            if first.get(label) and second.get(label):
                same.append(first[label] == second[label])
        return same
    before = ranks(first)
    after = ranks(second)
    same = []
    for one, other in combinations(before, 2):
        order = np.sign(before[one] - before[other])
        same.append(bool(order == np.sign(after[one] - after[other])))
    return same


def measure(people: Mapping[str, Answers]) -> dict[str, Any]:
    """The content of agreement.json: shares with the numbers that they are of.

    Args:
        people: All answers by name, see ``people.read_all``.
    """
    by_person = {}
    first_answers: dict[str, dict[str, Mapping[str, Any]]] = {}  # by task and name
    for name, answers in people.items():
        same: list[bool] = []  # when asked again
        counts = {"answers": 0, "skipped": 0, "asked_again": 0}
        for (task, again), row in answers.items():
            is_skipped = row["answer"] is None
            if not again:
                counts["answers"] += 1
                counts["skipped"] += is_skipped
                if not is_skipped:
                    first_answers.setdefault(task, {})[name] = row
                continue
            counts["asked_again"] += 1
            first = answers.get((task, False))
            if not is_skipped and first is not None and first["answer"] is not None:
                same += comparisons(row["kind"], first["answer"], row["answer"])
        by_person[name] = counts | {"with_themselves": _share(same)}
    between = {kind: _between(kind, first_answers) for kind in (SET, PAIR, EDIT)}
    return {"people": by_person, "between_people": between}


def _between(kind: str, first_answers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict:
    """Agreement about the tasks of a kind that two people or more answered."""
    same: list[bool] = []
    concordance = []
    num_tasks = 0
    for by_name in first_answers.values():
        answers = [row["answer"] for row in by_name.values() if row["kind"] == kind]
        if len(answers) < 2:
            continue
        num_tasks += 1
        for first, second in combinations(answers, 2):
            same += comparisons(kind, first, second)
        if kind == SET:
            w = kendalls_w([ranks(answer) for answer in answers])
            if w is not None:
                concordance.append(w)
    summary: dict[str, Any] = {"tasks": num_tasks, "pairwise": _share(same)}
    if kind == SET:
        mean = float(np.mean(concordance)) if concordance else None
        summary["kendalls_w"] = {"mean": mean, "n": len(concordance)}
    return summary


def _share(same: Sequence[bool]) -> dict[str, float | int | None]:
    return {"share": sum(same) / len(same) if same else None, "n": len(same)}
