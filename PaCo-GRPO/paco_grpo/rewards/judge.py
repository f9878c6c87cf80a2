"""Rewards that ask a vision-language model over an OpenAI-compatible server (docs/method.md §1, arXiv 2512.04784)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from paco_grpo.rewards.subfigures import check_panels
from paco_judge.client import JudgeClient, Pair
from paco_judge.grid import pairs, parse_layout, split_image, split_prompt
from paco_judge.questions import (
    criteria_questions,
    editing_questions,
    grid_layout_question,
    theme_no_duplicates_question,
    theme_question,
)
from paco_judge.verdict import editing_score, mean_over_dimensions, mean_score

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item
    from paco_judge.verdict import Verdict

logger = logging.getLogger(__name__)

URL = "http://127.0.0.1:8000"
_THEME_QUESTIONS = {"theme": theme_question, "theme_no_duplicates": theme_no_duplicates_question}
QUESTIONS = (*_THEME_QUESTIONS, "criteria")


class JudgeReward:
    """Base of the rewards that ask a judge about each image. Subclasses define ``questions``.

    Args:
        base_url: Address of the server (``bash vllm_server/launch.sh``).
        model: Served name; None = ``default_model`` of the class.
        api_key: If the server requires one.
        max_concurrency: Requests in flight; None = the client's default.
        deadline_s: Seconds until a pair counts as missing; None = the client's default.
    """

    default_model = "PaCo-Reward-7B"

    def __init__(
        self,
        base_url: str = URL,
        model: str | None = None,
        api_key: str | None = None,
        max_concurrency: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        limits = {"max_concurrency": max_concurrency, "deadline_s": deadline_s}
        limits = {name: value for name, value in limits.items() if value is not None}
        self.client = JudgeClient(base_url, model or self.default_model, api_key=api_key, **limits)

    def check(self) -> None:
        """Ask the server which models it serves.

        Raises:
            JudgeError: It does not answer, or does not serve the model.
        """
        self.client.check()

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


class ConsistencyScore(JudgeReward):
    """consistency_score: mean P(Yes) over all unordered pairs of sub-figures of an image.

    Args:
        base_url, model, api_key, max_concurrency, deadline_s: See ``JudgeReward``.
        question: ``theme``, ``theme_no_duplicates`` (near-duplicates count as No), or ``criteria`` (one question for
            each criterion of the item).

    Raises:
        ValueError: Unknown ``question``.
    """

    def __init__(
        self,
        base_url: str = URL,
        model: str | None = None,
        api_key: str | None = None,
        question: str = "theme",
        max_concurrency: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(base_url, model, api_key, max_concurrency, deadline_s)
        if question not in QUESTIONS:
            raise ValueError(f"consistency_score: question={question!r} is unknown. Known: {', '.join(QUESTIONS)}")
        self.question = question

    @staticmethod
    def check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: The prompt has a single panel, or there are no criteria to ask about.
        """
        check_panels(item, "consistency_score")
        if kwargs.get("question") == "criteria":
            _criteria(item)

    def questions(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """Each pair with the theme question, or with one question for each criterion."""
        rows, cols = check_panels(item, "consistency_score")
        cells = split_image(image, rows, cols)
        couples = [(cells[i], cells[j]) for i, j in pairs(len(cells))]
        if self.question in _THEME_QUESTIONS:
            text = _THEME_QUESTIONS[self.question](split_prompt(item.prompt).theme)
            return [Pair(a, b, text) for a, b in couples], mean_score
        by_dimension = _criteria(item)
        texts = [text for dimension in by_dimension.values() for text in dimension]

        def score(verdicts: list[Verdict]) -> float | None:
            """Mean within a dimension, then over dimensions, then over pairs; None if one verdict is missing."""
            p_yes = iter([verdict.p_yes for verdict in verdicts])
            of_pairs = [
                mean_over_dimensions({d: list(islice(p_yes, len(named))) for d, named in by_dimension.items()})
                for _ in couples
            ]
            return None if None in of_pairs else sum(of_pairs) / len(of_pairs)

        return [Pair(a, b, text) for a, b in couples for text in texts], score


def _criteria(item: Item) -> dict[str, tuple[str, ...]]:
    try:
        return criteria_questions(item.metadata.get("criteria") or {})
    except ValueError as error:
        raise ValueError(f"consistency_score, item {item.item_id}: {error}") from error


class ConsistencyForEditing(JudgeReward):
    """consistency_for_editing: sqrt(P(the rest is kept) · P(the instruction is followed)) of an edit."""

    def questions(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """Two questions on the reference and the edited image."""
        reference = reference_of(item, "consistency_for_editing")
        asked = [Pair(reference, image, question) for question in editing_questions(item.prompt)]
        return asked, lambda verdicts: editing_score(*verdicts)


class GridLayout(JudgeReward):
    """grid_layout: P(Yes) to "is this an RxC grid" on the whole image.

    The default model is the base of PaCo-Reward: the judge itself was tuned on pairs, not on single images.
    """

    default_model = "Qwen2.5-VL-7B-Instruct"

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
        return [Pair(image, None, grid_layout_question(*self.check_item(item)))], mean_score


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
