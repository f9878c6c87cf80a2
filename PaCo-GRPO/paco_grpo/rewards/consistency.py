"""consistency_score: what the PaCo-Reward judge says about the sub-figures of one grid (arXiv 2512.04784, §3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from paco_grpo.types import Item
from paco_judge.client import JudgeClient, Pair
from paco_judge.grid import pairs, split_image, split_prompt
from paco_judge.questions import theme_no_duplicates_question, theme_question
from paco_judge.verdict import mean_score

_QUESTIONS = {"theme": theme_question, "theme_no_duplicates": theme_no_duplicates_question}


class ConsistencyScore:
    """Mean P(Yes) over all unordered pairs of sub-figures of each image; NaN if one pair has no score."""

    def __init__(self, client: JudgeClient, question: str) -> None:
        self.client = client
        self.ask = _QUESTIONS[question]

    def check(self) -> None:
        """Ask the server which models it has.

        Raises:
            JudgeError: It does not answer or lacks the model; the message lists what it has and how to launch it.
        """
        self.client.check()

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64 in [0, 1], NaN = missing.

        Raises:
            ValueError: An item's prompt has a single panel, so there is nothing to compare.
        """
        asked: list[Pair] = []
        counts: list[int] = []
        for image, item in zip(images, items, strict=True):
            grid = split_prompt(item.prompt)
            if grid.rows * grid.cols < 2:
                raise ValueError(
                    f"consistency_score compares sub-figures, but item {item.item_id} has one: {item.prompt!r}"
                )
            cells = split_image(image, grid.rows, grid.cols)
            question = self.ask(grid.theme)
            of_image = [Pair(cells[i], cells[j], question) for i, j in pairs(len(cells))]
            asked.extend(of_image)
            counts.append(len(of_image))
        verdicts = iter(self.client.score_blocking(asked))
        means = [mean_score([next(verdicts) for _ in range(count)]) for count in counts]
        return np.array([np.nan if mean is None else mean for mean in means], dtype=np.float64)


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
        question: ``theme``, or ``theme_no_duplicates`` (near-duplicates count as No).
        max_concurrency: Requests in flight; None = the client's default.
        deadline_s: Seconds until a pair counts as missing; None = the client's default.

    Raises:
        ValueError: Unknown ``question``.
    """
    if question not in _QUESTIONS:
        raise ValueError(f"consistency_score: question={question!r} is not known. Known: {', '.join(_QUESTIONS)}")
    optional = {"api_key": api_key, "max_concurrency": max_concurrency, "deadline_s": deadline_s}
    given = {name: value for name, value in optional.items() if value is not None}
    return ConsistencyScore(JudgeClient(base_url=base_url, model=model, **given), question)
