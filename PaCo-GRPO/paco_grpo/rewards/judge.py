"""Rewards that ask a vision-language model over an OpenAI-compatible server (docs/method.md §1, arXiv 2512.04784)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from paco_grpo.rewards.subfigures import check_panels
from paco_judge.client import JudgeClient, Pair
from paco_judge.grid import pairs, parse_layout, split_image, split_prompt
from paco_judge.questions import (
    EDITING,
    Question,
    RequestForm,
    load_editing_questions,
    load_question,
    record,
)
from paco_judge.verdict import editing_score, mean_over_dimensions, mean_score

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item
    from paco_judge.verdict import Verdict

logger = logging.getLogger(__name__)

_SUB_FIGURES, _LAYOUT = ("theme", "criterion"), ("rows", "cols")  # what questions can be about


@dataclass(eq=False)
class ServerReward:
    """Base of the rewards that ask a model behind a server (``bash vllm_server/launch.sh``).

    Args:
        base_url: Address of the server; default: http://127.0.0.1:8000.
        model: Served name; None = ``default_model`` of the class.
        api_key: If the server requires one.
        host, port: Instead of ``base_url``.
        max_concurrency: Requests in flight.
        deadline_s: Seconds until a pair counts as missing.

    Raises:
        ValueError: ``base_url`` and ``host`` or ``port`` are both given, or a value is out of range.
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
        for name in ("host", "port"):
            if self.base_url is not None and getattr(self, name) is not None:
                raise ValueError(f"base_url={self.base_url!r} and {name}={getattr(self, name)!r} exclude each other")
        self.client = JudgeClient(
            self.base_url or f"http://{self.host or '127.0.0.1'}:{self.port or 8000}",
            self.model or self.default_model,
            api_key=self.api_key,
            max_concurrency=self.max_concurrency,
            deadline_s=self.deadline_s,
            form=self.form(),
        )

    def form(self) -> RequestForm:
        """How images and answers travel."""
        return RequestForm()

    def check(self) -> None:
        """Ask the server which models it serves.

        Raises:
            JudgeError: It does not answer, or does not serve the model.
        """
        self.client.check()


@dataclass(eq=False)
class JudgeReward(ServerReward):
    """Base of the rewards whose score is made of P(Yes). Subclasses define ``load`` and ``pairs``.

    Args:
        base_url, model, api_key, host, port, max_concurrency, deadline_s: See ``ServerReward``.
        question: A shipped template's name (``paco_judge/questions.toml``), or the path of a text file.
        image_labels, image_format, answer_tokens: See ``paco_judge.questions.RequestForm``.

    Raises:
        ValueError: A question that is unknown or about something else, or as ``ServerReward`` and ``RequestForm``.
    """

    question: str | Sequence[str] = ""
    image_labels: str | None = None
    image_format: str = "png"
    answer_tokens: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked = self.load(self.question)

    @staticmethod
    def load(question: str | Sequence[str]) -> tuple[Question, ...]:
        """The templates that ``question`` names. Raises ValueError."""
        raise NotImplementedError

    def form(self) -> RequestForm:
        return RequestForm(self.image_labels, self.image_format, self.answer_tokens)

    @property
    def record(self) -> dict[str, Any]:
        """The texts that are asked, with their SHA-256, and the form of the requests."""
        return record(self.asked, self.form())

    def questions(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """The questions on one image, and the function that makes its score of their verdicts (None = missing)."""
        raise NotImplementedError

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing; all questions of the call are in flight together."""
        asked = [self.questions(image, item) for image, item in zip(images, items, strict=True)]
        verdicts = self.client.score_blocking([pair for its_pairs, _ in asked for pair in its_pairs])
        failed = [verdict.error for verdict in verdicts if not verdict.ok]
        if failed:
            logger.warning("%d of %d questions have no score; the first: %s", len(failed), len(verdicts), failed[0])
        answers = iter(verdicts)
        scores = [score(list(islice(answers, len(its_pairs)))) for its_pairs, score in asked]
        return np.array([np.nan if score is None else score for score in scores], dtype=np.float64)


@dataclass(eq=False)
class ConsistencyScore(JudgeReward):
    """consistency_score: mean P(Yes) over all unordered pairs of sub-figures of an image.

    ``question``: ``theme``, ``theme_no_duplicates`` (near-duplicates count as No), ``criteria`` (one question for each
    criterion of the item), or a file with {theme} or {criterion}.
    """

    question: str = "theme"

    @staticmethod
    def load(question: str) -> tuple[Question, ...]:
        return (load_question(question, _SUB_FIGURES),)

    @staticmethod
    def check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: The prompt has a single panel, or there are no criteria to ask about.
        """
        check_panels(item, "consistency_score")
        _texts(load_question(kwargs.get("question", "theme"), _SUB_FIGURES), item)

    def questions(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """Each pair of sub-figures with the item's question or questions."""
        cells = split_image(image, *check_panels(item, "consistency_score"))
        couples = [(cells[i], cells[j]) for i, j in pairs(len(cells))]
        by_dimension = _texts(self.asked[0], item)
        texts = [text for dimension in by_dimension.values() for text in dimension]

        def score(verdicts: list[Verdict]) -> float | None:
            """Mean within a dimension, then over dimensions, then over pairs; None if one verdict is missing."""
            p_yes = iter([verdict.p_yes for verdict in verdicts])
            of_pairs = [
                mean_over_dimensions({d: list(islice(p_yes, len(named))) for d, named in by_dimension.items()})
                for _ in couples
            ]
            return None if None in of_pairs else float(np.mean(of_pairs))

        return [Pair(a, b, text) for a, b in couples for text in texts], score


def _texts(question: Question, item: Item) -> dict[str, tuple[str, ...]]:
    theme = split_prompt(item.prompt).theme if "theme" in question.fields else ""
    try:
        return question.texts(item.metadata.get("criteria") or {}, theme=theme)
    except ValueError as error:
        raise ValueError(f"consistency_score, item {item.item_id}: {error}") from error


@dataclass(eq=False)
class ConsistencyForEditing(JudgeReward):
    """consistency_for_editing: sqrt(P(the rest is kept) · P(the instruction is followed)) of an edit.

    ``question``: two, in this order, or one, whose P(Yes) is then the score.
    """

    question: str | Sequence[str] = EDITING

    @staticmethod
    def load(question: str | Sequence[str]) -> tuple[Question, ...]:
        return load_editing_questions(question)

    def questions(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """One or two questions on the reference and the edited image."""
        reference = reference_of(item, "consistency_for_editing")
        texts = [question.text(instruction=item.prompt.strip()) for question in self.asked]
        return [Pair(reference, image, text) for text in texts], lambda verdicts: editing_score(*verdicts)


@dataclass(eq=False)
class GridLayout(JudgeReward):
    """grid_layout: P(Yes) to "is this an RxC grid" on the whole image.

    The default model is the base of PaCo-Reward: the judge itself was tuned on pairs, not on single images.

    Args:
        binary: 1 where Yes is more probable than No, else 0, instead of P(Yes).
    """

    question: str = "grid_layout"
    binary: bool = False
    default_model = "Qwen2.5-VL-7B-Instruct"

    @staticmethod
    def load(question: str) -> tuple[Question, ...]:
        return (load_question(question, _LAYOUT),)

    @staticmethod
    def check_item(item: Item, kwargs: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Rows and columns of the grid.

        Raises:
            ValueError: The prompt states no grid.
        """
        rows, cols = parse_layout(item.prompt)
        if rows * cols < 2:
            raise ValueError(f"grid_layout needs a prompt with a layout, item {item.item_id} has none: {item.prompt!r}")
        return rows, cols

    def questions(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """One question on one image."""
        rows, cols = self.check_item(item)

        def score(verdicts: list[Verdict]) -> float | None:
            p_yes = mean_score(verdicts)
            return float(p_yes > 0.5) if self.binary and p_yes is not None else p_yes

        return [Pair(image, None, self.asked[0].text(rows=rows, cols=cols))], score


def reference_of(item: Item, reward: str) -> Image.Image:
    """The item's reference image.

    Raises:
        ValueError: It has none; the message names the reward and the item.
    """
    reference = item.image
    if reference is None:
        raise ValueError(
            f"{reward} compares with a reference image, but item {item.item_id} has none; "
            "config.prompt_fn must be an editing kind (geneval_image or arrow_editing)"
        )
    return reference
