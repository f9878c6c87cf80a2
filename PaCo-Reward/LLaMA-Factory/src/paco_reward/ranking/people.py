"""What people answered: one file for each person, which is on the disk before the next picture."""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paco_judge.files import Journal, read_json_lines
from paco_reward.ranking.tasks import Task

ANSWERS = "answers"  # folder beside the results
_RECENT = 20  # answers that the time left is estimated from
_FEWEST_TIMES = 3

Slot = tuple[str, bool]  # a task's key, and whether it is asked again
Answer = dict[str, Any]


def current_answers(rows: Sequence[Mapping[str, Any]]) -> dict[Slot, Mapping[str, Any]]:
    """The last row of each slot, without those that were taken back; the latest is last."""
    answers: dict[Slot, Mapping[str, Any]] = {}
    for row in rows:
        slot = (row["task"], row["again"])
        answers.pop(slot, None)
        if not row.get("undo"):
            answers[slot] = row
    return answers


def read_all(output: Path) -> dict[str, dict[Slot, Mapping[str, Any]]]:
    """The answers of all people by name, and by slot, in the order in which they gave them."""
    people = {}
    for file in sorted((output / ANSWERS).glob("*.jsonl")):
        answers = current_answers(read_json_lines(file))
        if answers:  # else somebody only looked
            people[file.stem] = answers
    return people


class Person:
    """A person's answers, and what they are asked next.

    Args:
        name: A file's name without suffix.
        output: The folder of the results.
        order: What each person is asked, see ``tasks.in_order``.
        stack: Keeps the file open, and other processes out of it.

    Raises:
        UserError: The file is damaged, or another process uses it.
    """

    def __init__(
        self, name: str, output: Path, order: Sequence[tuple[Task, bool]], stack: ExitStack
    ) -> None:
        self.name = name
        self._order = order
        journal = Journal(output / ANSWERS / f"{name}.jsonl", sync=True)
        self._journal = stack.enter_context(journal)
        self._answers = dict(current_answers(self._journal.rows))

    def open_tasks(self) -> list[tuple[Task, bool]]:
        """What is left, the next one first. What a person skipped is not asked again."""
        left = []
        for task, again in self._order:
            first = self._answers.get((task.key, False))
            was_skipped = again and first is not None and first["answer"] is None
            if (task.key, again) not in self._answers and not was_skipped:
                left.append((task, again))
        return left

    def answer(self, task: Task, again: bool, answer: Answer | None, seconds: float) -> bool:
        """Keep an answer; None: skipped. Returns whether it takes the place of another."""
        slot = (task.key, again)
        replaces = slot in self._answers
        self._answers.pop(slot, None)
        row = {
            "task": task.key,
            "kind": task.kind,
            "again": again,
            "answer": answer,
            "row": dict(task.row),
            "seconds": seconds,
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self._journal.append(row)
        self._answers[slot] = row
        return replaces

    def undo(self) -> bool:
        """Take back the last answer to what is asked now; returns whether there was one."""
        asked = {(task.key, again) for task, again in self._order}
        answered = [slot for slot in self._answers if slot in asked]
        if not answered:
            return False
        task, again = answered[-1]
        self._journal.append({"task": task, "again": again, "undo": True})
        del self._answers[task, again]
        return True

    def can_undo(self) -> bool:
        """Whether ``undo`` has something to take back."""
        return len(self.open_tasks()) < len(self._order)

    def seconds_left(self, num_left: int) -> float | None:
        """An estimate from the median of the last answers; None: there are too few."""
        recent = list(self._answers.values())[-_RECENT:]
        if len(recent) < _FEWEST_TIMES:
            return None
        return num_left * statistics.median(row["seconds"] for row in recent)
