"""consistency_for_editing: sqrt(kept · followed), what the judge says about an edit (method §1, arXiv 2512.04784)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paco_grpo.rewards.judging import JudgeReward, judge_client
from paco_judge.client import Pair
from paco_judge.questions import editing_questions
from paco_judge.verdict import editing_score

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item
    from paco_judge.verdict import Verdict


class ConsistencyForEditing(JudgeReward):
    """Asks on (reference, edited, instruction): is the rest kept, is the instruction followed."""

    def asked(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """Two questions on one pair.

        Raises:
            ValueError: The item has no reference image.
        """
        reference = reference_of(item, "consistency_for_editing")
        return [Pair(reference, image, question) for question in editing_questions(item.prompt)], _score


def _score(verdicts: list[Verdict]) -> float | None:
    return editing_score(*verdicts)


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


def consistency_for_editing(
    base_url: str = "http://127.0.0.1:8000",
    model: str = "PaCo-Reward-7B",
    api_key: str | None = None,
    max_concurrency: int | None = None,
    deadline_s: float | None = None,
) -> ConsistencyForEditing:
    """The judge on edits, over an OpenAI-compatible server; arguments as in ``consistency_score``."""
    return ConsistencyForEditing(judge_client(base_url, model, api_key, max_concurrency, deadline_s))
