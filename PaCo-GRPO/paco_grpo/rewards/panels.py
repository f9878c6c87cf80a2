"""The panels that a prompt asks for, for rewards that compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paco_judge.grid import parse_layout

if TYPE_CHECKING:
    from paco_grpo.types import Item


def check_panels(reward: str, item: Item) -> tuple[int, int]:
    """Rows and columns of the grid that ``item`` asks for.

    Raises:
        ValueError: It is a single panel, so there is nothing to compare; the message names ``reward``.
    """
    rows, cols = parse_layout(item.prompt)
    if rows * cols < 2:
        raise ValueError(f"{reward} compares sub-figures, but item {item.item_id} has one: {item.prompt!r}")
    return rows, cols


def has_panels(reward: str) -> Callable[[Item, Mapping[str, Any]], None]:
    """``check_item`` of a factory whose reward compares panels (see ``registry``)."""

    def check_item(item: Item, kwargs: Mapping[str, Any]) -> None:
        check_panels(reward, item)

    return check_item
