"""The base of the rewards that ask a model on a server, and of those that ask for Yes or No."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image
from typing_extensions import override

from paco_grpo.item import Item
from paco_judge import transport
from paco_judge.client import JudgeClient
from paco_judge.questions import Pair, Question, RequestForm, load_question, record

# Questions, and the function from their P(Yes) (NaN = no answer) to the scores of the images (NaN =
# missing).
ScoreRequest = tuple[list[Pair], Callable[[np.ndarray], ArrayLike]]

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 30.0


@dataclass(eq=False)
class ServerReward(ABC):
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

    def identity(self) -> str | None:
        """Of the model, as its server says it; None: it does not. Raises UserError."""
        return self.client.identity()

    def form(self) -> RequestForm:
        """How a question is put to the model."""
        return RequestForm()

    @abstractmethod
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing."""


@dataclass(eq=False)
class JudgeReward(ServerReward):
    """Base of the rewards whose score is made of P(Yes).

    Subclasses define ``fields`` and ``ask``.

    ``question``: the name of a question (``paco_judge/questions.toml``), or the path of a text
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

    @override
    def form(self) -> RequestForm:
        return RequestForm(self.image_labels, self.image_format, self.answer_tokens)

    @abstractmethod
    def ask(self, images: Sequence[Image.Image], item: Item) -> ScoreRequest:
        """About images of one item: all of them if the reward ``compares_images``, else one."""

    def prove(self, items: Sequence[Item]) -> None:
        """Ask the first question that an item has, about plain images."""
        images = plain_images(2 if self.compares_images else 1)
        for item in items:
            questions, _ = self.ask(images, item)
            if questions:  # an item that is not open has none
                self.client.prove(questions[0])
                return

    @override
    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        # All questions of the call are in flight together.
        groups: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            key = item.item_id if self.compares_images else index
            groups.setdefault(key, []).append(index)
        requests: list[ScoreRequest] = []
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


def plain_images(count: int) -> list[Image.Image]:
    """Images for a question whose answer does not matter, of the size of small grids."""
    return [Image.new("RGB", (512, 512), color) for color in ("gray", "white")[:count]]
