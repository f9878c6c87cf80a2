"""Rewards that ask the judge: about panels, images of a prompt, edits and layouts.

See docs/method.md §1 (arXiv 2512.04784).
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from typing_extensions import override

from paco_grpo.item import Item
from paco_grpo.rewards.asking import JudgeReward, ScoreRequest, ServerReward
from paco_grpo.rewards.subfigures import grid_of
from paco_judge.grid import index_pairs, split_image, split_prompt
from paco_judge.questions import (
    BETTER,
    EDITING,
    Pair,
    Question,
    load_editing_questions,
    load_question,
)

# Also the names that configurations may give as paco_grpo.rewards.judge:NAME.
__all__ = [
    "BetweenImages",
    "ConsistencyForEditing",
    "ConsistencyScore",
    "GridLayout",
    "JudgeReward",
    "ServerReward",
    "WinRate",
]

_FOLLOWED = "editing_instruction"


@dataclass(eq=False)
class ConsistencyScore(JudgeReward):
    """consistency_score: mean P(Yes) over all unordered pairs of panels of an image.

    ``question``: ``theme``, ``theme_no_duplicates`` (near-duplicates count as No), ``criteria``
    (one question for each criterion of the item), or a file with {theme} or {criterion}.
    """

    question: str | Sequence[str] = "theme"
    name: ClassVar[str] = "consistency_score"
    fields = ("theme", "criterion")

    @classmethod
    def check_item(cls, item: Item, kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError: The item has no grid, or nothing that the question asks about."""
        grid_of(item, cls.name)
        (question,) = cls.load(kwargs.get("question", cls.question))
        _texts(question, item, cls.name)

    @override
    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """About every pair of panels of the one image."""
        (image,) = images
        panels = split_image(image, *grid_of(item, self.name))
        couples = [(panels[i], panels[j]) for i, j in index_pairs(len(panels))]
        questions = self.about(couples, item)
        return questions, lambda p_yes: self.agreement(p_yes, item).mean()

    def about(self, couples: Sequence[tuple[Image.Image, Image.Image]], item: Item) -> list[Pair]:
        """All that is asked about ``item``, on each of n pairs of panels."""
        texts = itertools.chain.from_iterable(_texts(self.questions[0], item, self.name))
        return [Pair(*couple, text) for couple, text in itertools.product(couples, texts)]

    def agreement(self, p_yes: np.ndarray, item: Item) -> np.ndarray:
        """P(Yes) of each pair (n,) from the answers to ``about``: the mean over dimensions.

        Of a dimension, it is the mean over its criteria.
        """
        sizes = [len(texts) for texts in _texts(self.questions[0], item, self.name)]
        by_pair = p_yes.reshape(-1, sum(sizes))
        dimensions = np.split(by_pair, np.cumsum(sizes)[:-1], axis=1)
        return np.mean([answers.mean(axis=1) for answers in dimensions], axis=0)


@dataclass(eq=False)
class BetweenImages(ConsistencyScore):
    """between_images: 1 − mean P(Yes) between panels of different images of a prompt.

    Only items whose row has ``"open": true`` are compared. It is 1 for the rest, whose prompts
    describe everything, and for an image without others. An image is compared with ``others``
    images, by one pair of panels each.
    """

    others: int = 14
    name: ClassVar[str] = "between_images"
    compares_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_even("others", self.others)

    @override
    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """About one pair of panels for each two neighboring images, if the item is open."""
        rows, cols = grid_of(item, self.name)
        panels = [split_image(image, rows, cols) for image in images]
        compared = neighbors(len(images), self.others) if item.metadata.get("open") else []
        # Two different panels, because panels of the same place look alike.
        places = itertools.cycle(itertools.permutations(range(rows * cols), 2))
        couples = []
        for i, j in compared:
            place, other_place = next(places)
            couples.append((panels[i][place], panels[j][other_place]))

        def score(p_yes: np.ndarray) -> np.ndarray:
            different = 1 - self.agreement(p_yes, item)
            values = np.stack([different, different], axis=1)
            return mean_over_comparisons(len(images), compared, values, alone=1.0)

        return self.about(couples, item), score


@dataclass(eq=False)
class WinRate(JudgeReward):
    """win_rate: mean probability that an image is better than another image of its prompt.

    Both orders are asked: the judge's preference for a place cancels. A comparison without both
    answers is left out. An image without any comparison has no score.

    Args:
        question: About two images that are shown last, answered Yes if the first of them is better,
            with {prompt}: two, for items without and with reference images (which are shown first),
            or one for both.
        opponents: Other images of its prompt that an image is compared with; None = all.
    """

    question: str | Sequence[str] = BETTER
    opponents: int | None = None
    compares_images: ClassVar[bool] = True
    fields = ("prompt",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents is not None:
            _check_even("opponents", self.opponents)

    @override
    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """Both orders of each two neighbors, one after the other."""
        opponents = len(images) if self.opponents is None else self.opponents
        compared = neighbors(len(images), opponents)
        references = item.images
        question = self.questions[-1] if references else self.questions[0]
        text = question.text(prompt=item.prompt.strip())
        questions = []
        for i, j in compared:
            for first, second in ((i, j), (j, i)):
                questions.append(_pair(text, (*references, images[first], images[second])))

        def score(p_yes: np.ndarray) -> np.ndarray:
            wins = (p_yes[::2] + 1 - p_yes[1::2]) / 2
            values = np.stack([wins, 1 - wins], axis=1)
            return mean_over_comparisons(len(images), compared, values, alone=np.nan)

        return questions, score


@dataclass(eq=False)
class ConsistencyForEditing(JudgeReward):
    """consistency_for_editing: sqrt(P(the rest is kept) · P(the instruction is followed)).

    ``question``: two, in this order, or one, whose P(Yes) is then the score. With several reference
    images, what is kept is asked about each of them and averaged, the instruction once with all
    (``editing_instruction_several``). Where an item's row has ``reference_boxes``, what is kept is
    asked about the parts of the reference images that are in them.
    """

    question: str | Sequence[str] = EDITING
    fields = ("instruction",)

    @classmethod
    @override
    def load(cls, question: str | Sequence[str]) -> tuple[Question, ...]:
        return load_editing_questions(question)

    @staticmethod
    def check_item(item: Item) -> None:
        """Raises ValueError: The item has no reference image."""
        check_references(item, "consistency_for_editing")

    @override
    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """All of the first question, then all of the second."""
        check_references(item, "consistency_for_editing")
        (image,) = images
        references = item.images
        parts: list[list[Pair]] = []  # the pairs that each question is asked about
        for number, question in enumerate(self.questions):
            is_instruction = number == 1 or question.name == _FOLLOWED
            with_all = is_instruction and len(references) > 1
            if with_all and question.name == _FOLLOWED:
                question = load_question(f"{_FOLLOWED}_several")
            text = question.text(instruction=item.prompt.strip())
            if with_all:
                parts.append([_pair(text, (*references, image))])
            else:
                shown = references if is_instruction else item.crops
                parts.append([_pair(text, (reference, image)) for reference in shown])

        def score(p_yes: np.ndarray) -> float:
            if len(parts) == 1:
                return p_yes.mean()
            num_kept = len(parts[0])
            return np.sqrt(p_yes[:num_kept].mean() * p_yes[num_kept:].mean())

        return list(itertools.chain.from_iterable(parts)), score


@dataclass(eq=False)
class GridLayout(JudgeReward):
    """grid_layout: P(Yes) to "is this an RxC grid" on the whole image.

    ``binary``: 1 where it is above ½, else 0. The default model is the base of PaCo-Reward: the
    judge itself was tuned on pairs, not on single images.
    """

    question: str | Sequence[str] = "grid_layout"
    binary: bool = False
    default_model = "Qwen2.5-VL-7B-Instruct"
    fields = ("rows", "cols")

    @staticmethod
    def check_item(item: Item) -> None:
        """Raises ValueError: The item has no grid."""
        grid_of(item, "grid_layout")

    @override
    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """About each whole image."""
        rows, cols = grid_of(item, "grid_layout")
        text = self.questions[0].text(rows=rows, cols=cols)

        def score(p_yes: np.ndarray) -> np.ndarray:
            if not self.binary:
                return p_yes
            return np.where(np.isnan(p_yes), np.nan, p_yes > 0.5)

        return [Pair(image, None, text) for image in images], score


def _texts(question: Question, item: Item, reward: str) -> list[tuple[str, ...]]:
    """What ``reward`` asks about an item, by dimension."""
    theme = split_prompt(item.prompt).theme if "theme" in question.fields else ""
    try:
        return list(question.texts(item.metadata.get("criteria") or {}, theme=theme).values())
    except ValueError as error:
        raise ValueError(f"{reward}: {error}") from error


def check_references(item: Item, reward: str) -> None:
    """Raises ValueError: The item has no reference image."""
    if not item.num_references:
        raise ValueError(
            f"{reward} needs a reference image, and there is none; "
            "config.prompt_fn must be an editing kind"
        )


def check_one_reference(item: Item, reward: str) -> None:
    """Raises ValueError: The item does not have exactly one reference image."""
    check_references(item, reward)
    if item.num_references > 1:
        raise ValueError(
            f"{reward} takes one reference image, but the item has {item.num_references}"
        )


def mean_over_comparisons(
    count: int, compared: Sequence[tuple[int, int]], values: np.ndarray, alone: float
) -> np.ndarray:
    """Each image's mean over its answered comparisons, (count,).

    It is NaN if none was answered, and ``alone`` if there was none.

    ``values``: what each comparison (i, j) contributes to i and to j, NaN = no answer.
    """
    scores = np.full(count, alone)
    images = np.array(compared, dtype=np.int64)
    for image in np.unique(images):
        of_image = values[images == image]
        scores[image] = np.nan if np.isnan(of_image).all() else np.nanmean(of_image)
    return scores


def _check_even(name: str, number: int) -> None:
    """Raises ValueError: ``number`` is odd, so neighbors cannot be equally many on both sides."""
    if number < 2 or number % 2:
        raise ValueError(f"{name}={number} must be even and at least 2")


def neighbors(count: int, others: int) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of ``count`` images in a ring, each with its ``others`` nearest."""
    reach = count if others >= count - 1 else others
    couples = []
    for i, j in itertools.combinations(range(count), 2):
        distance = min(j - i, count - j + i)
        if 2 * distance <= reach:
            couples.append((i, j))
    return couples


def _pair(text: str, shown: Sequence[Image.Image]) -> Pair:
    return Pair(shown[0], shown[1], text, tuple(shown[2:]))
