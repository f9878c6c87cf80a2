"""grid_layout: does a vision-language model see an image as the RxC grid that its prompt asks for?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paco_grpo.rewards.judging import JudgeReward, judge_client
from paco_judge.client import Pair
from paco_judge.grid import parse_layout
from paco_judge.questions import grid_layout_question
from paco_judge.verdict import mean_score

if TYPE_CHECKING:
    from PIL import Image

    from paco_grpo.types import Item
    from paco_judge.verdict import Verdict


class GridLayout(JudgeReward):
    """P(Yes) to "is this an RxC grid" on the whole image."""

    def asked(self, image: Image.Image, item: Item) -> tuple[list[Pair], Callable[[list[Verdict]], float | None]]:
        """One question on one image.

        Raises:
            ValueError: The prompt states no grid.
        """
        rows, cols = _grid_of(item)
        return [Pair(image, None, grid_layout_question(rows, cols))], mean_score


def _grid_of(item: Item) -> tuple[int, int]:
    rows, cols = parse_layout(item.prompt)
    if rows * cols < 2:
        raise ValueError(f"grid_layout needs a prompt with a layout, item {item.item_id} has none: {item.prompt!r}")
    return rows, cols


def grid_layout(
    base_url: str = "http://127.0.0.1:8000",
    model: str = "Qwen2.5-VL-7B-Instruct",
    api_key: str | None = None,
    max_concurrency: int | None = None,
    deadline_s: float | None = None,
) -> GridLayout:
    """A general vision-language model over an OpenAI-compatible server.

    The default model is the base of PaCo-Reward: the judge itself was tuned on pairs, not on single images. Other
    arguments as in ``consistency_score``.
    """
    return GridLayout(judge_client(base_url, model, api_key, max_concurrency, deadline_s))


def _check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
    _grid_of(item)


grid_layout.check_item = _check_item
