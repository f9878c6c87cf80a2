"""Labeled pairs of images that a user brings (`build-dataset --pairs FILE`).

FILE is .jsonl, .csv or .json, one pair in each row:

  image1, image2   image files, relative to FILE
  label            Yes or No (also true, false, 1, 0), or instead of it
  score            0 (not consistent) to 1
  theme, reason    optional: what both images are about, why the label is right
"""

import csv
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator, Field
from tqdm import tqdm

from paco_judge.errors import UserError
from paco_judge.files import read_json_lines
from paco_judge.images import content_digest, load_image
from paco_judge.questions import Question, load_question
from paco_reward.pairing.answers import split_verdict
from paco_reward.pairing.inputs import Text, row_of
from paco_reward.pairing.select import LabeledPair

logger = logging.getLogger(__name__)


def _none_if_blank(value: Any) -> Any:
    """Tables write nothing into columns that are not used."""
    return None if isinstance(value, str) and not value.strip() else value


OptionalText = Annotated[Text | None, BeforeValidator(_none_if_blank)]


class PairRow(pydantic.BaseModel):
    """A row of the file; other columns are ignored."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True, str_strip_whitespace=True)

    image1: Text
    image2: Text
    label: Annotated[bool | None, BeforeValidator(_none_if_blank)] = None
    score: Annotated[float | None, BeforeValidator(_none_if_blank), Field(ge=0, le=1)] = None
    theme: OptionalText = None
    reason: OptionalText = None

    @pydantic.model_validator(mode="after")
    def _either(self) -> "PairRow":
        if (self.label is None) == (self.score is None):
            raise ValueError("needs either a label or a score")
        return self


@dataclass(frozen=True)
class OwnPairs:
    """The usable rows of a file."""

    pairs: list[LabeledPair]  # in the file's order, with images by their names in ``images``
    images: dict[str, Path]  # the name of each image in the data set, and where it is now
    questions: tuple[Question, ...]  # that the pairs are asked with
    shown: list[list[str]]  # images and theme of every row
    counts: dict[str, int]  # of rows by their fate


def read_pairs(file: Path, question_name: str | None, min_gap: float) -> OwnPairs:
    """Read and check all rows and decode all images.

    Args:
        file: See above.
        question_name: Template or text file. None: ``theme``, or ``pair`` for rows without a theme.
        min_gap: Scores nearer to 1/2 than half of it are left out, and counted as ``unclear``.

    Raises:
        UserError: Names the first row that cannot be used, and how many more there are.
    """
    reader = _PairReader(file.parent, question_name, min_gap)
    pairs = []
    problems = []
    rows = _rows(file)
    for number, values in enumerate(tqdm(rows, desc="pairs"), start=1):
        try:
            pairs.append(reader.pair(row_of(values, PairRow)))
        except ValueError as error:
            problems.append(f"{file} row {number}: {error}")
    if problems:
        others = f" ({len(problems) - 1} more rows cannot be used)" if len(problems) > 1 else ""
        raise UserError(problems[0] + others)
    clear = [pair for pair in pairs if pair is not None]
    if len({pair.label for pair in clear}) < 2:
        raise UserError(
            f"{file}: of {len(rows)} pairs {len(clear)} have a clear label, all of them the same; "
            "the judge learns from as many Yes as No"
        )
    counts = {"pairs": len(rows), "unclear": len(rows) - len(clear)}
    questions = tuple(reader.questions.values())
    return OwnPairs(clear, reader.images, questions, reader.shown, counts)


class _PairReader:
    """Makes labeled pairs of rows."""

    def __init__(self, folder: Path, question_name: str | None, min_gap: float) -> None:
        self.images: dict[str, Path] = {}
        self.questions: dict[str, Question] = {}
        self.shown: list[list[str]] = []
        self._folder = folder
        self._question_name = question_name
        self._min_gap = min_gap
        self._names: dict[Path, str] = {}
        self._name_of_content: dict[bytes, str] = {}

    def pair(self, row: PairRow) -> LabeledPair | None:
        """None if its score is unclear. Raises UserError: The row cannot be used."""
        first = self._image(row.image1)
        second = self._image(row.image2)
        if first == second:
            raise UserError("image1 and image2 are the same image")
        name = self._question_name or ("theme" if row.theme else "pair")
        if name not in self.questions:
            self.questions[name] = load_question(name, ("theme",))
        question = self.questions[name]
        if "theme" in question.fields and row.theme is None:
            raise UserError(f"it has no theme, which the question {name} asks about")
        self.shown.append([first, second, row.theme or ""])
        label = self._label(row)
        if label is None:
            return None
        answer = None if row.reason is None else _answer(label, row.reason)
        text = question.text(theme=row.theme or "")
        return LabeledPair(first, second, text, label, "pair", group="", reason=answer)

    def _label(self, row: PairRow) -> bool | None:
        """The label, or the side of 1/2 on which the score is; None: it is too near."""
        if row.label is not None:
            return row.label
        largest_no = 0.5 - self._min_gap / 2
        least_yes = 0.5 + self._min_gap / 2
        return None if largest_no < row.score < least_yes else row.score >= least_yes

    def _image(self, stated: str) -> str:
        """The name in the data set of an image."""
        file = self._folder / stated
        if file in self._names:
            return self._names[file]
        if not file.is_file():
            raise UserError(f"image {file} does not exist; paths are relative to the file of pairs")
        # Copies of an image are one image: their pairs must not be on both sides of the split.
        digest = content_digest(load_image(file))
        name = self._name_of_content.setdefault(
            digest, f"pair_images/{digest.hex()[:16]}{file.suffix.lower()}"
        )
        self._names[file] = name
        self.images.setdefault(name, file)
        return name


def _answer(label: bool, reason: str) -> str:
    """The answer to be learned: the verdict, then the reason."""
    verdict = "Yes" if label else "No"
    says_yes, sentences = split_verdict(reason)
    if says_yes not in (None, label):
        raise UserError(f"its reason does not say {verdict}, as its label does")
    return f"{verdict}. {sentences}" if sentences else verdict


def _rows(file: Path) -> list[dict[str, Any]]:
    """The values of each row by column. Raises UserError."""
    readers = {".csv": _csv_rows, ".jsonl": read_json_lines, ".json": _json_rows}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise UserError(f"{file} must be a .jsonl, .csv or .json file")
    rows = []
    unused: Counter[str] = Counter()
    for row in reader(file):
        values = {str(name).strip().casefold(): value for name, value in row.items()}
        unused.update(values.keys() - PairRow.model_fields.keys())
        rows.append(values)
    if not rows:
        raise UserError(f"{file} holds no pairs")
    if unused:
        logger.warning("columns that are not used: %s", ", ".join(sorted(unused)))
    return rows


def _csv_rows(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as text:
        rows = list(csv.DictReader(text, strict=True))
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise UserError(
                f"{file} row {number} has more cells than the first line has names; put quotes "
                "around texts with commas"
            )
    return rows


def _json_rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_bytes())
