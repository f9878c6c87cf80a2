"""The reward consistency_score, and the base of all rewards that ask a model on a server.

See docs/method.md §1 (arXiv 2512.04784). The other rewards of the judge are in ``judge``.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from paco_grpo.item import Item
from paco_grpo.rewards.subfigures import grid_of
from paco_judge import transport
from paco_judge.client import JudgeClient
from paco_judge.grid import index_pairs, split_image, split_prompt
from paco_judge.questions import Pair, Question, RequestForm, load_question, record

# Questions, and the function from their P(Yes) (NaN = no answer) to the scores of the images (NaN =
# missing).
ScoreRequest = tuple[list[Pair], Callable[[np.ndarray], Any]]

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0


@dataclass(eq=False)
class ServerReward:
    """Base of the rewards that ask a model behind a server.

    Subclasses define ``prove(items)``, which asks the first real question of a run about plain
    images. Raises UserError.

    Args:
        base_url: Default: http://127.0.0.1:8000. Or give ``host`` and ``port``.
        model: Served name; None = ``default_model`` of the class. If it has none either, the
            server's PaCo-Reward-7B, or its only model.
        api_key: Default: the environment's VLLM_API_KEY. No file has it.
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
    # Named where the judge would not do: another model must not answer in its place.
    default_model: ClassVar[str | None] = None
    # Another address, or the same model under another name, gives the same scores.
    where: ClassVar[tuple[str, ...]] = (
        "base_url", "host", "port", "model", "max_concurrency", "deadline_s"
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.base_url is not None and (self.host or self.port):
            raise ValueError(
                f"base_url={self.base_url!r} excludes host={self.host!r} and port={self.port!r}"
            )
        address = transport.url_of(self.host or "127.0.0.1", self.port or 8000)
        self.client = JudgeClient(
            self.base_url or address,
            self.model or self.default_model,
            api_key=self.api_key,
            max_concurrency=self.max_concurrency,
            deadline_s=self.deadline_s,
            form=self.form(),
        )
        self.check = self.client.check
        # Calls of one image each: the client limits the requests in flight.
        self.parallel_calls = self.max_concurrency

    def weights(self) -> str | None:
        """The identity of the model, as its server says it; None: it does not. Raises UserError."""
        return self.client.identity()

    def form(self) -> RequestForm:
        """How a question is put to the model."""
        return RequestForm()


@dataclass(eq=False)
class JudgeReward(ServerReward):
    """Base of the rewards whose score is made of P(Yes).

    Subclasses define ``fields`` and ``ask(images, item)``, which returns a ``ScoreRequest`` on
    images of one item: on all of them where the reward ``compares_images``, else on a single one.

    ``question``: a shipped template's name (``paco_judge/questions.toml``), or the path of a text
    file. ``image_labels``, ``image_format``, ``answer_tokens``: see
    ``paco_judge.questions.RequestForm``.
    """

    question: str | Sequence[str] = ""
    image_labels: str | None = None
    image_format: str = "png"
    answer_tokens: str = "exact"
    # True: ``ask`` gets all images of an item, else one at a time.
    compares_images: ClassVar[bool] = False
    fields: ClassVar[tuple[str, ...]]  # which a question may have

    def __post_init__(self) -> None:
        super().__post_init__()
        self.questions = self.load(self.question)
        self._logged = -math.inf  # when a question without an answer was logged last
        self.record = record(self.questions, self.form())

    @classmethod
    def load(cls, question: str | Sequence[str]) -> tuple[Question, ...]:
        """The templates that ``question`` names. Raises ValueError."""
        names = (question,) if isinstance(question, str) else question
        return tuple(load_question(name, cls.fields) for name in names)

    def form(self) -> RequestForm:
        """As in ``ServerReward``; with the labels, format and answer tokens of this reward."""
        return RequestForm(self.image_labels, self.image_format, self.answer_tokens)

    def prove(self, items: Sequence[Item]) -> None:
        """As in ``ServerReward``."""
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
            key = item.item_id if self.compares_images else index
            groups.setdefault(key, []).append(index)
        requests = []
        questions: list[Pair] = []
        for members in groups.values():
            request = self.ask([images[i] for i in members], items[members[0]])
            requests.append(request)
            questions += request[0]
        verdicts = self.client.score(questions)
        self._log([verdict.error for verdict in verdicts if not verdict.ok])
        # The P(Yes) of a question without an answer is None, which becomes NaN.
        answers = np.array([verdict.p_yes for verdict in verdicts], dtype=np.float64)
        scores = np.full(len(images), np.nan)
        for members, (questions_of_group, score) in zip(groups.values(), requests, strict=True):
            count = len(questions_of_group)
            scores[members] = score(answers[:count])
            answers = answers[count:]
        return scores

    def _log(self, errors: Sequence[str | None]) -> None:
        """At most a line in 30 seconds: calls of one image each fail at once without a judge."""
        if errors and time.monotonic() - self._logged > _LOG_EVERY_S:
            self._logged = time.monotonic()
            logger.warning("%d questions have no score; the last one: %s", len(errors), errors[-1])


@dataclass(eq=False)
class ConsistencyScore(JudgeReward):
    """consistency_score: mean P(Yes) over all unordered pairs of sub-figures of an image.

    ``question``: ``theme``, ``theme_no_duplicates`` (near-duplicates count as No), ``criteria``
    (one question for each criterion of the item), or a file with {theme} or {criterion}.
    """

    question: str = "theme"
    name: ClassVar[str] = "consistency_score"
    fields = ("theme", "criterion")

    @classmethod
    def check_item(cls, item: Item, kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError: The item has no grid, or nothing that the question asks about."""
        grid_of(item, cls.name)
        _texts(*cls.load(kwargs.get("question", cls.question)), item, cls.name)

    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """About every pair of sub-figures of the one image."""
        (image,) = images
        cells = split_image(image, *grid_of(item, self.name))
        couples = [(cells[i], cells[j]) for i, j in index_pairs(len(cells))]
        questions = self.about(couples, item)
        return questions, lambda p_yes: self.agreement(p_yes, item).mean()

    def about(self, couples: Sequence[tuple[Image.Image, Image.Image]], item: Item) -> list[Pair]:
        """All that is asked about ``item``, on each of n pairs of sub-figures."""
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


def plain_images(count: int) -> list[Image.Image]:
    """Images for a question whose answer does not matter, of the size of small grids."""
    return [Image.new("RGB", (512, 512), color) for color in ("gray", "white")[:count]]


def _texts(question: Question, item: Item, reward: str) -> list[tuple[str, ...]]:
    """What ``reward`` asks about an item, by dimension."""
    theme = split_prompt(item.prompt).theme if "theme" in question.fields else ""
    try:
        return list(question.texts(item.metadata.get("criteria") or {}, theme=theme).values())
    except ValueError as error:
        raise ValueError(f"{reward}: {error}") from error
