"""The page of `paco-reward rank`: whose turn it is, and what their keys mean."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.files import hash_value
from paco_judge.pages import person_name
from paco_reward.pairing.answers import split_verdict
from paco_reward.pairing.inputs import plain_text
from paco_reward.ranking.people import ANSWERS, Answer, Person
from paco_reward.ranking.tasks import EDIT_LABELS, PAIR, SET, Task, shown_order

_SEEN_S = 12.0  # a tab that asked so lately is open
_LONGEST_REASON = 1000


class RankPage:
    """What ``paco_judge.pages.page_app`` serves.

    A name is the same in upper and lower case: a person who types it another way goes on.

    Args:
        order: What each person is asked, see ``tasks.in_order``.
        output: The folder of the results.
        finish: Is called when a person has answered all; returns the commands that come next.
        stack: Closes the files of answers.

    Raises:
        UserError: A file of answers is damaged.
    """

    html = Path(__file__).with_name("rank.html")

    def __init__(
        self,
        order: Sequence[tuple[Task, bool]],
        output: Path,
        finish: Callable[[], list[str]],
        stack: ExitStack,
    ) -> None:
        self._order = order
        self._output = output
        self._finish = finish
        self._stack = stack
        self._people: dict[str, Person] = {}  # by name in lower case
        self._tabs: dict[str, dict[str, float]] = {}  # when each tab of a name last asked
        self._slots = {}
        for task, again in order:
            self._slots[_question(task, again)] = (task, again)
        self._shown: dict[str, dict[str, Path]] = {}  # pictures that each person is asked about
        self._commands: list[str] = []
        # Opening a file removes a line that a power loss cut off: the results are of all files.
        for file in sorted((output / ANSWERS).glob("*.jsonl")):
            self._opened(file.stem)

    def state(self, query: Mapping[str, Any]) -> dict[str, Any]:
        """What a person is asked now."""
        person = self._person(query)
        left = person.open_tasks()
        now = time.monotonic()
        tabs = self._tabs[person.name]
        is_other_open = False
        for tab, last_asked in tabs.items():
            if tab != str(query.get("tab")) and now - last_asked < _SEEN_S:
                is_other_open = True
        state = {
            "name": person.name,
            "done": len(self._order) - len(left),
            "total": len(self._order),
            "seconds_left": person.seconds_left(len(left)),
            "can_undo": person.can_undo(),
            "other_tab": is_other_open,
        }
        shown = self._shown[person.name] = {}
        if not left:
            try:
                self._commands = self._commands or self._finish()
            except OSError as error:
                raise UserError(f"the results could not be written: {error}") from error
            return state | {"kind": "end", "commands": self._commands}
        (task, again), *later = left
        state["load"] = []
        if later:
            following, _ = later[0]
            state["load"] = _names(following.pictures)
            shown |= dict(zip(state["load"], following.pictures, strict=True))
        names = _names(task.pictures)
        shown |= dict(zip(names, task.pictures, strict=True))
        if task.kind == SET:
            names = [names[0]] + [names[index] for index in shown_order(task, person.name, again)]
        return state | {
            "kind": task.kind,
            "question": _question(task, again),
            "text": task.text,
            "pictures": names,
        }

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Keep the answer to ``question``, a name that the state gave."""
        person = self._person(body)
        if body.get("question") not in self._slots:
            raise UserError("this is not asked any more; reload the page")
        task, again = self._slots[body["question"]]
        answer = None
        if not body.get("skipped"):
            answer = _answer(task, shown_order(task, person.name, again), body)
        seconds = body.get("seconds")
        measured = float(seconds) if isinstance(seconds, int | float) else 0.0
        try:
            replaces = person.answer(task, again, answer, measured)
        except OSError as error:
            raise UserError(f"the answer could not be written: {error}") from error
        if not person.open_tasks():
            self._commands = []
        return self.state(body) | {"replaced": replaces}

    def undo(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the last question again."""
        self._person(body).undo()
        return self.state(body)

    def picture(self, name: str) -> Path | None:
        """A picture of what somebody is asked now or next."""
        for pictures in self._shown.values():
            if name in pictures and pictures[name].is_file():
                return pictures[name]
        return None

    def _person(self, query: Mapping[str, Any]) -> Person:
        person = self._opened(person_name(query.get("name")))
        self._tabs.setdefault(person.name, {})[str(query.get("tab"))] = time.monotonic()
        return person

    def _opened(self, name: str) -> Person:
        key = name.casefold()
        if key not in self._people:
            self._people[key] = Person(name, self._output, self._order, self._stack)
        return self._people[key]


def _question(task: Task, again: bool) -> str:
    return hash_value([task.key, again])[:16]


def _names(pictures: Iterable[Path]) -> list[str]:
    """Opaque names of pictures, the same each time."""
    return [hash_value(str(picture))[:24] for picture in pictures]


def _answer(task: Task, order: Sequence[int], body: Mapping[str, Any]) -> Answer:
    """What a person answered, as the files of answers have it. Raises UserError."""
    if task.kind == SET:
        return _ranking(task, order, body.get("order"))
    labels = ("label",) if task.kind == PAIR else EDIT_LABELS
    answer: Answer = {}
    for name in labels:
        said = body.get(name)
        if said not in ("Yes", "No", None):
            raise UserError(f"{name} is Yes or No, not {said!r}")
        answer[name] = said
    if not any(answer.values()):
        raise UserError("answer Yes or No, or skip")
    reason = " ".join(str(body.get("reason") or "").split())[:_LONGEST_REASON]
    if task.kind == PAIR and reason:
        says_yes, _ = split_verdict(reason)
        if says_yes is not None and says_yes != (answer["label"] == "Yes"):
            raise UserError("the reason begins with the other answer")
        try:
            answer["reason"] = plain_text(reason)
        except ValueError as error:
            raise UserError(f"the reason {error}") from error
    return answer


def _ranking(task: Task, order: Sequence[int], classes: Any) -> Answer:
    """Of places as shown: ``[[2], [0, 1], [3]]`` is the third, then two equal ones, then the last.

    Raises UserError: Not every candidate is in it once.
    """
    flat = []
    if isinstance(classes, list) and all(isinstance(places, list) for places in classes):
        flat = [place for places in classes for place in places]
    if sorted(map(str, flat)) != sorted(map(str, range(len(order)))):
        raise UserError("the answer has not every picture once; reload the page")
    candidates = task.row["comp_images"]
    ranked: list[str] = []
    equal = []
    for places in classes:
        names = [candidates[order[place] - 1] for place in places]
        ranked += names
        if len(names) > 1:
            equal.append(names)
    answer: Answer = {"rank_images": ranked}
    if equal:
        answer["equal"] = equal
    return answer
