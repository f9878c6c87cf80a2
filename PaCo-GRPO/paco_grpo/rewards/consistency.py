"""consistency_score: what the PaCo-Reward judge says about the sub-figures of one grid (arXiv 2512.04784, §3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from paco_grpo.rewards.judging import JudgeReward, judge_client
from paco_grpo.rewards.panels import check_panels
from paco_judge.client import JudgeClient, Pair
from paco_judge.grid import pairs, split_image, split_prompt
from paco_judge.questions import criteria_questions, theme_no_duplicates_question, theme_question
from paco_judge.verdict import mean_over_dimensions, mean_score

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item
    from paco_judge.verdict import Verdict

_OF_THEME = {"theme": theme_question, "theme_no_duplicates": theme_no_duplicates_question}
QUESTIONS = (*_OF_THEME, "criteria")


class ConsistencyScore(JudgeReward):
    """Mean P(Yes) over all unordered pairs of sub-figures of each image; NaN if one pair has no score."""

    def __init__(self, client: JudgeClient, question: str) -> None:
        super().__init__(client)
        self.question = question

    def asked(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """Every pair with the theme question, or with one question for each criterion of the item.

        Raises:
            ValueError: An item's prompt has a single panel, or the item no criteria to ask about.
        """
        grid = split_prompt(item.prompt)
        check_panels("consistency_score", item)
        cells = split_image(image, grid.rows, grid.cols)
        couples = [(cells[i], cells[j]) for i, j in pairs(len(cells))]
        if self.question in _OF_THEME:
            text = _OF_THEME[self.question](grid.theme)
            return [Pair(a, b, text) for a, b in couples], mean_score
        by_dimension = _criteria_of(item)
        texts = [text for named in by_dimension.values() for text in named]
        sizes = {dimension: len(named) for dimension, named in by_dimension.items()}
        return [Pair(a, b, text) for a, b in couples for text in texts], lambda v: _criteria_score(v, sizes)


def _criteria_of(item: Item) -> dict[str, list[str]]:
    try:
        return criteria_questions(item.metadata.get("criteria") or {})
    except ValueError as error:
        raise ValueError(f"consistency_score, item {item.item_id}: {error}") from error


def _criteria_score(verdicts: list[Verdict], sizes: dict[str, int]) -> float | None:
    """Mean within a dimension, then over dimensions, then over pairs (method §1); None if one verdict is missing."""
    scores = iter([verdict.p_yes for verdict in verdicts])
    count = len(verdicts) // sum(sizes.values())
    of_pairs = [mean_over_dimensions({d: list(islice(scores, n)) for d, n in sizes.items()}) for _ in range(count)]
    return None if None in of_pairs else sum(of_pairs) / count


def consistency_score(
    base_url: str = "http://127.0.0.1:8000",
    model: str = "PaCo-Reward-7B",
    api_key: str | None = None,
    question: str = "theme",
    max_concurrency: int | None = None,
    deadline_s: float | None = None,
) -> ConsistencyScore:
    """The pairwise judge over an OpenAI-compatible server.

    Args:
        base_url: Of the server (``bash vllm_server/launch.sh``).
        model: Served name.
        api_key: If the server wants one.
        question: ``theme``, ``theme_no_duplicates`` (near-duplicates count as No), or ``criteria`` (one question for
            each criterion of the item).
        max_concurrency: Requests in flight; None = the client's default.
        deadline_s: Seconds until a pair counts as missing; None = the client's default.

    Raises:
        ValueError: Unknown ``question``.
    """
    if question not in QUESTIONS:
        raise ValueError(f"consistency_score: question={question!r} is not known. Known: {', '.join(QUESTIONS)}")
    return ConsistencyScore(judge_client(base_url, model, api_key, max_concurrency, deadline_s), question)


def _check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
    check_panels("consistency_score", item)
    if kwargs.get("question") == "criteria":
        _criteria_of(item)


consistency_score.check_item = _check_item
