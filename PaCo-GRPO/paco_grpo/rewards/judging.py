"""What the judge rewards share: a client from keyword arguments, a check of the server, means with missing as NaN."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paco_judge.client import JudgeClient, Pair

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item
    from paco_judge.verdict import Verdict

logger = logging.getLogger(__name__)


def judge_client(
    base_url: str, model: str, api_key: str | None, max_concurrency: int | None, deadline_s: float | None
) -> JudgeClient:
    """A client; None leaves its own default."""
    optional = {"api_key": api_key, "max_concurrency": max_concurrency, "deadline_s": deadline_s}
    return JudgeClient(base_url=base_url, model=model, **{k: v for k, v in optional.items() if v is not None})


class JudgeReward:
    """A reward whose images are asked about over a server. Subclasses say what is asked and what follows from it."""

    def __init__(self, client: JudgeClient) -> None:
        self.client = client

    def check(self) -> None:
        """Ask the server which models it has.

        Raises:
            JudgeError: It does not answer or lacks the model; the message lists what it has and how to launch it.
        """
        self.client.check()

    def asked(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """The questions on one image, and its score from their verdicts (None = missing)."""
        raise NotImplementedError

    def __call__(self, images: Sequence[Image.Image], items: Sequence[Item]) -> np.ndarray:
        """Scores (n,) float64, NaN = missing; all questions of the call are in flight together."""
        asked = [self.asked(image, item) for image, item in zip(images, items, strict=True)]
        verdicts = self.client.score_blocking([pair for pairs, _ in asked for pair in pairs])
        failed = [verdict.error for verdict in verdicts if not verdict.ok]
        if failed:
            logger.warning("%d of %d questions have no score; the first: %s", len(failed), len(verdicts), failed[0])
        answers = iter(verdicts)
        scores = [score([next(answers) for _ in pairs]) for pairs, score in asked]
        return np.array([np.nan if score is None else score for score in scores], dtype=np.float64)
