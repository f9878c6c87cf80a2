"""Grid prompts and grid images.

A grid prompt reads ``… a RxC grid layout <theme>.<shared description> LABEL:text LABEL:text …``
with labels such as ``[TOP]-[LEFT]:``, ``[MIDDLE]:`` or ``PANEL-3:``. Panels are returned row-major:
left to right, then top to bottom.
"""

import itertools
import re
import textwrap
from dataclasses import dataclass

from PIL import Image

# At most two digits: "1024x1024" is a size, and so is "64x64 px".
_LAYOUT = re.compile(
    r"(?P<grid_of>(?:grid|layout) of )?"
    r"(?<![\d.,])(?P<rows>\d{1,2})\s*(?:[xX×⨉*]|by\b)\s*(?P<cols>\d{1,2})"
    r"(?![\d.,]*\d)(?![\s-]*(?:px|pixel))"
    r"(?P<grid>[\s-]+(?:grid|layout|panel))?"
)
_BRACKET = r"\[[A-Z0-9]+(?:-[A-Z0-9]+)*\]"
# A label counts only where a sentence or a quotation has just ended: the same characters inside a
# text are text.
_END = r"(?:(?<=[.!?…。！？\"”»])|(?<=[.!?…][)'’]))"
_LABEL = re.compile(rf"{_END}\s+(?P<label>{_BRACKET}(?:-{_BRACKET})*|PANEL-\d{{1,9}}):")
_NAMED_ROWS = {"TOP": 0, "MIDDLE-TOP": 1, "MIDDLE": 2, "CENTER": 2, "MIDDLE-BOTTOM": 3, "BOTTOM": 4}
_NAMED_COLS = {"LEFT": 0, "MIDDLE-LEFT": 1, "MIDDLE": 2, "CENTER": 2, "MIDDLE-RIGHT": 3, "RIGHT": 4}


class PromptLayoutError(ValueError):
    """The panels of a prompt do not match the layout that it states."""


@dataclass(frozen=True)
class GridPrompt:
    """A parsed grid prompt. ``panels``: ``rows * cols`` texts, row-major."""

    theme: str
    panels: tuple[str, ...]
    rows: int
    cols: int


def parse_layout(prompt: str) -> tuple[int, int]:
    """(rows, cols) of the first ``RxC grid`` in the prompt; (1, 1) without one.

    Also of an ``RxC`` alone, if there are so many panel labels: "a 4x4 truck" is no layout.

    Raises PromptLayoutError: It has no panels.
    """
    sizes = []
    for match in _LAYOUT.finditer(prompt):
        rows = int(match["rows"])
        cols = int(match["cols"])
        if match["grid"] or match["grid_of"]:
            if rows < 1 or cols < 1:
                raise PromptLayoutError(f"layout {rows}x{cols} has no panels")
            return rows, cols
        sizes.append((rows, cols))
    num_labels = len(_LABEL.findall(prompt)) or 1
    for rows, cols in sizes:
        if rows * cols == num_labels:
            return rows, cols
    return 1, 1


def split_prompt(prompt: str) -> GridPrompt:
    """Split a grid prompt into its theme (the part before the first label) and its panel texts.

    A prompt without layout and labels is one panel: theme and panel text are the prompt itself.

    Raises:
        PromptLayoutError: There are not rows x columns panel texts, a label occurs twice, or a
            panel is empty.
    """
    rows, cols = parse_layout(prompt)
    labels = list(_LABEL.finditer(prompt))
    if not labels and rows * cols == 1:
        return GridPrompt(prompt.strip(), (prompt.strip(),), 1, 1)
    names = [match["label"] for match in labels]
    excerpt = textwrap.shorten(prompt, 160)
    if len(names) != rows * cols:
        raise PromptLayoutError(
            f"a {rows}x{cols} layout but {len(names)} panel labels ({', '.join(names) or 'none'}); "
            "a label such as '[TOP]-[LEFT]:' or 'PANEL-1:' must follow '. ' or '\" '. "
            f"Prompt: {excerpt}"
        )
    ends = [match.start() for match in labels[1:]] + [len(prompt)]
    texts: dict[str, str] = {}
    for match, end in zip(labels, ends, strict=True):
        texts[match["label"]] = prompt[match.end() : end].strip()
    if len(texts) < len(names):
        raise PromptLayoutError(
            f"a panel label occurs more than once: {', '.join(names)}. Prompt: {excerpt}"
        )
    for name, text in texts.items():
        if not text:
            raise PromptLayoutError(f"panel {name!r} has no text. Prompt: {excerpt}")
    is_table = rows > 1 and cols > 1
    places = {name: _position(name, is_table) for name in names}
    distinct = set(places.values())
    if None not in distinct and len(distinct) == len(names):  # else in the prompt's order
        names.sort(key=places.get)
    theme = prompt[: labels[0].start()].strip()
    return GridPrompt(theme, tuple(texts[name] for name in names), rows, cols)


def split_image(image: Image.Image, rows: int, cols: int) -> list[Image.Image]:
    """``rows * cols`` equal panels, row-major.

    Pixels left over at the right or bottom are dropped. Raises ValueError.
    """
    if not (1 <= rows <= image.height and 1 <= cols <= image.width):
        raise ValueError(
            f"an image of {image.width}x{image.height} pixels cannot be cut into "
            f"{rows}x{cols} panels"
        )
    width = image.width // cols
    height = image.height // rows
    panels = []
    for row in range(rows):
        for col in range(cols):
            left = col * width
            top = row * height
            panels.append(image.crop((left, top, left + width, top + height)))
    return panels


def index_pairs(n: int) -> list[tuple[int, int]]:
    """All pairs (i, j) with i < j of n panels, in lexical order."""
    return list(itertools.combinations(range(n), 2))


def _position(label: str, is_table: bool) -> tuple[int, int] | None:
    """(row, column) of a label; None if it names none. ``is_table``: of rows and columns."""
    if label.startswith("PANEL-"):
        return (0, int(label.removeprefix("PANEL-")))
    parts = label.strip("[]").split("]-[")
    if len(parts) == 1 and is_table:  # [TOP-LEFT]; in a column, [MIDDLE-TOP] is one of four rows
        parts = label.strip("[]").split("-")
    if len(parts) == 1:
        parts.append("MIDDLE")
    if len(parts) > 2:
        return None
    for row, col in itertools.permutations(parts):  # the column may come first
        if row in _NAMED_ROWS and col in _NAMED_COLS:
            return _NAMED_ROWS[row], _NAMED_COLS[col]
    return None
