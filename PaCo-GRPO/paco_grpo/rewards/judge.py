"""Rewards that ask a vision-language model over an OpenAI-compatible server (docs/method.md §1, arXiv 2512.04784)."""

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.subfigures import check_panels
from paco_judge.client import JudgeClient, Pair
from paco_judge.grid import pairs, split_image, split_prompt
from paco_judge.questions import BETTER, EDITING, Question, RequestForm, load_question, record

# Questions, and the function from their P(Yes) (NaN = no answer) to the scores of the images (NaN = missing).
ScoreRequest = tuple[list[Pair], Callable[[np.ndarray], Any]]

logger = logging.getLogger(__name__)

_FOLLOWED = "editing_instruction"
_LOG_EVERY_S = 30.0


class Failures:
    """Logs questions without an answer, seldom: many calls of one image each fail at once when a judge is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._logged = -math.inf

    def add(self, errors: Sequence[str | None]) -> None:
        """Count ``errors``; log the number since the last line, if that is long ago."""
        with self._lock:
            self._count += len(errors)
            if time.monotonic() - self._logged < _LOG_EVERY_S:
                return
            count = self._count
            self._count = 0
            self._logged = time.monotonic()
        logger.warning("%d questions have no score; the last one: %s", count, errors[-1])


@dataclass(eq=False)
class ServerReward:
    """Base of the rewards that ask a model behind a server.

    Args:
        base_url: Default: http://127.0.0.1:8000. Or give ``host`` and ``port``.
        model: Served name; None = ``default_model``.
        api_key: Default: the environment's VLLM_API_KEY, which keeps it out of options and files.
        max_concurrency: Requests in flight.
        deadline_s: Seconds until a pair counts as missing.
    """

    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    host: str | None = None
    port: int | None = None
    max_concurrency: int = 64
    deadline_s: float = 600.0
    default_model = "PaCo-Reward-7B"

    def __post_init__(self) -> None:
        if self.base_url is not None and (self.host or self.port):
            raise ValueError(
                f"base_url={self.base_url!r} excludes host={self.host!r} and port={self.port!r}"
            )
        self.client = JudgeClient(
            self.base_url or f"http://{self.host or '127.0.0.1'}:{self.port or 8000}",
            self.model or self.default_model,
            api_key=self.api_key or os.environ.get("VLLM_API_KEY") or None,
            max_concurrency=self.max_concurrency,
            deadline_s=self.deadline_s,
            form=self.form(),
        )
        self.check = self.client.check
        # Calls of one image each: the client limits the requests in flight.
        self.parallel_calls = self.max_concurrency

    def form(self) -> RequestForm:
        """How a question is put to the model."""
        return RequestForm()

    def prove(self, items: Sequence[Item]) -> None:
        """Ask the first real question of a run about plain images. Raises JudgeError."""
        raise NotImplementedError


@dataclass(eq=False)
class JudgeReward(ServerReward):
    """Base of the rewards whose score is made of P(Yes). Subclasses define ``fields`` and ``ask``.

    ``question``: a shipped template's name (``paco_judge/questions.toml``), or the path of a text file.
    ``image_labels``, ``image_format``, ``answer_tokens``: see ``paco_judge.questions.RequestForm``.
    """

    question: str | Sequence[str] = ""
    image_labels: str | None = None
    image_format: str = "png"
    answer_tokens: str = "exact"
    compares_images: ClassVar[bool] = (
        False  # True: ``ask`` gets all images of an item, else one at a time
    )
    fields: ClassVar[tuple[str, ...]]  # which a question may have
    most_questions: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked = self.load(self.question)
        self.failures = Failures()
        self.record = record(self.asked, self.form())

    @classmethod
    def load(cls, question: str | Sequence[str]) -> tuple[Question, ...]:
        """The templates that ``question`` names. Raises ValueError."""
        named = (question,) if isinstance(question, str) else tuple(question)
        if not 1 <= len(named) <= cls.most_questions:
            raise ValueError(
                f"question={question!r} names {len(named)} questions, but takes 1 to {cls.most_questions}"
            )
        return tuple(load_question(name, cls.fields) for name in named)

    def form(self) -> RequestForm:
        return RequestForm(self.image_labels, self.image_format, self.answer_tokens)

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """The questions on ``images`` of one ``item``: a single image, or all of them where it ``compares_images``."""
        raise NotImplementedError

    def prove(self, items: Sequence[Item]) -> None:
        images = plain_images(2 if self.compares_images else 1)
        for item in items:
            questions, _ = self.ask(images, item)
            if questions:  # an item that is not open has none
                self.client.prove(questions[0])
                return

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing; all questions of the call are in flight together."""
        groups: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault(item.item_id if self.compares_images else index, []).append(index)
        asked = [
            self.ask([images[i] for i in members], items[members[0]]) for members in groups.values()
        ]
        verdicts = self.client.score([question for questions, _ in asked for question in questions])
        if failed := [verdict.error for verdict in verdicts if not verdict.ok]:
            self.failures.add(failed)
        answers = np.array(
            [verdict.p_yes for verdict in verdicts], dtype=np.float64
        )  # None becomes NaN
        scores = np.full(len(images), np.nan)
        for members, (questions, score) in zip(groups.values(), asked, strict=True):
            scores[members] = score(answers[: len(questions)])
            answers = answers[len(questions) :]
        return scores


@dataclass(eq=False)
class ConsistencyScore(JudgeReward):
    """consistency_score: mean P(Yes) over all unordered pairs of sub-figures of an image.

    ``question``: ``theme``, ``theme_no_duplicates`` (near-duplicates count as No), ``criteria`` (one question for each
    criterion of the item), or a file with {theme} or {criterion}.
    """

    question: str = "theme"
    name: ClassVar[str] = "consistency_score"
    fields = ("theme", "criterion")

    @classmethod
    def check_item(cls, item: Item, kwargs: Mapping[str, Any]) -> None:
        check_panels(item, cls.name)
        _texts(*cls.load(kwargs.get("question", cls.question)), item, cls.name)

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        (image,) = images
        cells = split_image(image, *check_panels(item, self.name))
        asked, of_pairs = self.about([(cells[i], cells[j]) for i, j in pairs(len(cells))], item)
        return asked, lambda p_yes: of_pairs(p_yes).mean()

    def about(self, couples: Sequence[tuple[Image.Image, Image.Image]], item: Item) -> ScoreRequest:
        """Questions on n pairs of sub-figures → their P(Yes), (n,): mean within a dimension, then over dimensions."""
        dimensions = _texts(self.asked[0], item, self.name)
        texts = [text for dimension in dimensions for text in dimension]
        ends = np.cumsum([len(dimension) for dimension in dimensions])[:-1]

        def of_pairs(p_yes: np.ndarray) -> np.ndarray:
            parts = np.split(p_yes.reshape(len(couples), len(texts)), ends, axis=1)
            return np.mean([part.mean(axis=1) for part in parts], axis=0)

        return [Pair(a, b, text) for a, b in couples for text in texts], of_pairs


@dataclass(eq=False)
class BetweenImages(ConsistencyScore):
    """between_images: 1 − mean P(Yes) between sub-figures of an image and of other images of its prompt (docs/rewards.md).

    Only items whose row has ``"open": true`` are compared; it is 1 for the others, whose prompts describe everything,
    and for an image without others. An image is compared with ``others`` images, by one pair of sub-figures each.
    """

    others: int = 14
    name: ClassVar[str] = "between_images"
    compares_images: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.others < 2:
            raise ValueError(f"others={self.others} must be at least 2")

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """About one pair of sub-figures of each two neighbors; nothing where the item is not open."""
        cells = [split_image(image, *check_panels(item, self.name)) for image in images]
        compared = neighbors(len(images), self.others) if item.metadata.get("open", False) else []
        # Two different sub-figures, because sub-figures of the same place look alike.
        places = itertools.cycle(itertools.permutations(range(len(cells[0])), 2))
        asked, of_pairs = self.about(
            [(cells[i][a], cells[j][b]) for (i, j), (a, b) in zip(compared, places)], item
        )

        def score(p_yes: np.ndarray) -> np.ndarray:
            different = 1 - of_pairs(p_yes)
            return mean_over_comparisons(
                len(images), compared, np.stack([different, different], axis=1), alone=1.0
            )

        return asked, score


@dataclass(eq=False)
class WinRate(JudgeReward):
    """win_rate: mean probability that an image is better than another image of its prompt (docs/rewards.md).

    Both orders are asked: the judge's preference for a place cancels. A comparison without both answers is left out; an
    image without any comparison has no score.

    Args:
        question: About two images that are shown last, answered Yes if the first of them is better, with {prompt}: two,
            for items without and with reference images (which are shown first), or one for both.
        opponents: Other images of its prompt that an image is compared with; None = all.
    """

    question: str | Sequence[str] = BETTER
    opponents: int | None = None
    compares_images: ClassVar[bool] = True
    fields, most_questions = ("prompt",), 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents is not None and (self.opponents < 2 or self.opponents % 2):
            raise ValueError(
                f"opponents={self.opponents} must be even and at least 2, or None for all"
            )

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """Both orders of each two neighbors, one after the other."""
        compared = neighbors(len(images), len(images) if self.opponents is None else self.opponents)
        references = item.images
        text = self.asked[-1 if references else 0].text(prompt=item.prompt.strip())
        orders = [order for i, j in compared for order in ((i, j), (j, i))]

        def score(p_yes: np.ndarray) -> np.ndarray:
            wins = (p_yes[::2] + 1 - p_yes[1::2]) / 2
            return mean_over_comparisons(
                len(images), compared, np.stack([wins, 1 - wins], axis=1), alone=np.nan
            )

        return [_pair(text, (*references, images[i], images[j])) for i, j in orders], score


def plain_images(count: int) -> list[Image.Image]:
    """Images for a question whose answer does not matter, of the size of small grids."""
    return [Image.new("RGB", (512, 512), color) for color in ("gray", "white")[:count]]


def mean_over_comparisons(
    count: int, compared: Sequence[tuple[int, int]], values: np.ndarray, alone: float
) -> np.ndarray:
    """Each image's mean over its answered comparisons, (count,): NaN if none was answered, ``alone`` if there was none.

    ``values``: what each comparison (i, j) contributes to i and to j, NaN = no answer.
    """
    scores, places = np.full(count, alone), np.array(compared)
    for image in {image for couple in compared for image in couple}:
        own = values[places == image]
        scores[image] = np.nan if np.isnan(own).all() else np.nanmean(own)
    return scores


def neighbors(count: int, others: int) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of ``count`` images in a ring, each with its ``others`` nearest."""
    reach = count if others >= count - 1 else others
    return [
        (i, j)
        for i, j in itertools.combinations(range(count), 2)
        if 2 * min(j - i, count - j + i) <= reach
    ]


def _pair(text: str, shown: Sequence[Image.Image]) -> Pair:
    return Pair(shown[0], shown[1], text, tuple(shown[2:]))


def _texts(question: Question, item: Item, reward: str) -> list[tuple[str, ...]]:
    """What ``reward`` asks about an item, by dimension."""
    theme = split_prompt(item.prompt).theme if "theme" in question.fields else ""
    try:
        return list(question.texts(item.metadata.get("criteria") or {}, theme=theme).values())
    except ValueError as error:
        raise ValueError(f"{reward}, item {item.item_id}: {error}") from error


@dataclass(eq=False)
class ConsistencyForEditing(JudgeReward):
    """consistency_for_editing: sqrt(P(the rest is kept) · P(the instruction is followed)) of an edit.

    ``question``: two, in this order, or one, whose P(Yes) is then the score. With several reference images, what is kept
    is asked about each of them and averaged, the instruction once with all (``editing_instruction_several``).
    """

    question: str | Sequence[str] = EDITING
    fields, most_questions = ("instruction",), 2

    @staticmethod
    def check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
        check_references(item, "consistency_for_editing")

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """All of the first question, then all of the second."""
        check_references(item, "consistency_for_editing")
        (image,), references = images, item.images
        asked: list[list[Pair]] = []
        for number, question in enumerate(self.asked):
            with_all = len(references) > 1 and (number == 1 or question.name == _FOLLOWED)
            if with_all and question.name == _FOLLOWED:
                question = load_question(f"{_FOLLOWED}_several")
            text = question.text(instruction=item.prompt.strip())
            shown = (
                [(*references, image)]
                if with_all
                else [(reference, image) for reference in references]
            )
            asked.append([_pair(text, together) for together in shown])

        def score(p_yes: np.ndarray) -> float:
            means = [part.mean() for part in np.split(p_yes, [len(asked[0])][: len(asked) - 1])]
            return np.sqrt(means[0] * means[1]) if len(means) == 2 else means[0]

        return [*itertools.chain(*asked)], score


@dataclass(eq=False)
class GridLayout(JudgeReward):
    """grid_layout: P(Yes) to "is this an RxC grid" on the whole image; ``binary``: 1 where it is above ½, else 0.

    The default model is the base of PaCo-Reward: the judge itself was tuned on pairs, not on single images.
    """

    question: str = "grid_layout"
    binary: bool = False
    default_model = "Qwen2.5-VL-7B-Instruct"
    fields = ("rows", "cols")

    @staticmethod
    def check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
        check_panels(item, "grid_layout")

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        rows, cols = check_panels(item, "grid_layout")
        questions = [
            Pair(image, None, self.asked[0].text(rows=rows, cols=cols)) for image in images
        ]
        return (
            questions,
            lambda p_yes: np.where(np.isnan(p_yes), np.nan, p_yes > 0.5) if self.binary else p_yes,
        )


def check_references(item: Item, reward: str) -> None:
    """Raises ValueError: The item has no reference image."""
    if not item.num_images:
        raise ValueError(
            f"{reward}: item {item.item_id} has no reference image; config.prompt_fn must be an editing kind"
        )
