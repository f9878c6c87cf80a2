"""EditReward-Bench: its rows, checked, and the pairs that a row asks about (images: reference first, then the edit)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edit_source import Source, find_source, open_source
from PIL import Image

from paco_eval.errors import ItemError
from paco_eval.images import read_image
from paco_judge.client import Pair
from paco_judge.questions import editing_dimension_questions
from paco_judge.verdict import Verdict, editing_score


@dataclass(frozen=True)
class EditRow:
    """Two edits of one image with one instruction, the better one first."""

    index: int  # position in the data set
    key: tuple[str, str]  # one name for each edit
    instruction: str
    task_type: str
    dimension: str
    questions: tuple[tuple[str, str], ...]  # (what it asks about, question), one or two

    @property
    def identity(self) -> tuple[int, str, str, str]:
        """What makes the row the same in a results file."""
        return self.index, *self.key, self.dimension

    @property
    def name(self) -> str:
        """What messages call it."""
        return row_name(self.index, self.key, self.dimension)


@dataclass
class EditBench:
    """A data set: its rows, the broken ones as (name, reason), and the way to a row's images."""

    source: Source
    rows: list[EditRow] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)


def row_name(index: int, key: Any, dimension: Any) -> str:
    """`row 12 [a, b] consistency`; what cannot be had is left out."""
    keys = f"[{', '.join(map(str, key))}]" if isinstance(key, list | tuple) else key
    return " ".join(["row", str(index), *(str(part) for part in (keys, dimension) if part)])


def load_bench(dataset: str | None, split: str | None = None) -> EditBench:
    """Read all rows but not their images. Broken rows are listed, not raised.

    Raises:
        BenchError: the data set cannot be had or lacks a column.
    """
    bench = EditBench(open_source(find_source(dataset), split))
    for index, raw in enumerate(bench.source.rows):
        if isinstance(raw, ItemError):
            bench.broken.append((row_name(index, None, None), str(raw)))
            continue
        try:
            bench.rows.append(_row(index, raw))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
            bench.broken.append((row_name(index, raw.get("key"), raw.get("dimension")), f"broken row: {reason}"))
    return bench


def _row(index: int, raw: dict[str, Any]) -> EditRow:
    key, texts = raw["key"], {name: raw[name] for name in ("instruction", "task_type", "dimension")}
    if not isinstance(key, list) or len(key) != 2:
        raise ValueError(f"key must name two edits, not {key!r}")
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name} must be a text, not {text!r}")
    questions = editing_dimension_questions(texts["dimension"], texts["instruction"])
    return EditRow(index, (str(key[0]), str(key[1])), **texts, questions=tuple(questions.items()))


def prepare(bench: EditBench, row: EditRow) -> tuple[list[Pair], Callable[[list[float]], dict]]:
    """A row's pairs (better edit first, for each its one or two questions), and what makes its result of their scores.

    Raises:
        ItemError: not one input and two outputs, or an image that cannot be read.
    """
    try:
        stored = bench.source.images(row.index)
        reference, outputs = stored["input_image"], stored["output_images"]
    except (KeyError, OSError, ValueError) as error:
        raise ItemError(f"its images cannot be had: {error!r}") from error
    if not isinstance(outputs, list) or len(outputs) != 2:
        number = f"{len(outputs)} images" if isinstance(outputs, list) else f"a {type(outputs).__name__}"
        raise ItemError(f"output_images must hold 2 images, the better first, not {number}")
    before = open_stored(reference, bench.source.root, "input_image")
    edits = [open_stored(image, bench.source.root, f"output_images[{i}]") for i, image in enumerate(outputs)]
    pairs = [Pair(before, edit, question) for edit in edits for _, question in row.questions]
    return pairs, lambda values: result_row(row, values)


def open_stored(stored: Any, root: Path, column: str) -> Image.Image:
    """An RGB image from what a data set holds: a path (relative to `root`), bytes, or a dict of the two.

    Raises:
        ItemError: nothing there, or unreadable.
    """
    if isinstance(stored, dict):
        stored = stored.get("bytes") or stored.get("path")
    if isinstance(stored, bytes):
        return read_image(stored, column)
    if not isinstance(stored, str) or not stored:
        raise ItemError(f"{column} holds no image but {stored!r}")
    return read_image(root / stored, f"{column} {root / stored}")


def result_row(row: EditRow, values: list[float]) -> dict[str, Any]:
    """What is written about a row; `values`: P(Yes) in [0, 1] of its pairs, in `prepare`'s order."""
    asked = [name for name, _ in row.questions]
    answers = [dict(zip(asked, values[: len(asked)])), dict(zip(asked, values[len(asked) :]))]
    return {
        "index": row.index,
        "key": list(row.key),
        "task_type": row.task_type,
        "dimension": row.dimension,
        "answers": answers,
        "scores": [dimension_score(answer, row.dimension) for answer in answers],
    }


def dimension_score(answers: dict[str, float], dimension: str) -> float:
    """One edit's score in [0, 1]: the answer to its question, or sqrt(prompt_following · consistency) for overall."""
    if dimension != "overall":
        return answers[dimension]
    return editing_score(Verdict(answers["consistency"]), Verdict(answers["prompt_following"]))
