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
from typing import Any

from tqdm import tqdm

from paco_judge.errors import UserError
from paco_judge.files import read_json_lines
from paco_judge.images import content_digest, load_image
from paco_judge.questions import Question, load_question
from paco_reward.datasets import RESERVED, TAG
from paco_reward.pairing.answers import split_verdict
from paco_reward.pairing.select import LabeledPair

COLUMNS = ("image1", "image2", "label", "score", "theme", "reason")
_YES = ("yes", "true", "1", "1.0")
_NO = ("no", "false", "0", "0.0")

logger = logging.getLogger(__name__)

Values = dict[str, Any]


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
    counts: Counter[str] = Counter()
    pairs = []
    problems = []
    for number, values in enumerate(tqdm(_rows(file), desc="pairs"), start=1):
        try:
            pair = reader.pair(values)
        except ValueError as error:
            problems.append(f"{file} row {number}: {error}")
            continue
        counts["pairs"] += 1
        if pair is None:
            counts["unclear"] += 1
        else:
            pairs.append(pair)
    if problems:
        others = f" ({len(problems) - 1} more rows cannot be used)" if len(problems) > 1 else ""
        raise UserError(problems[0] + others)
    labels = {pair.label for pair in pairs}
    if len(labels) < 2:
        raise UserError(
            f"{file}: of {counts['pairs']} pairs {len(pairs)} have a clear label, all of them the "
            "same; the judge learns from as many Yes as No"
        )
    questions = tuple(reader.questions.values())
    return OwnPairs(pairs, reader.images, questions, reader.shown, counts)


class _PairReader:
    """Makes a labeled pair of a row's values."""

    def __init__(self, folder: Path, question_name: str | None, min_gap: float) -> None:
        self.images: dict[str, Path] = {}
        self.questions: dict[str, Question] = {}
        self.shown: list[list[str]] = []
        self._folder = folder
        self._question_name = question_name
        self._min_gap = min_gap
        self._names: dict[Path, str] = {}
        self._name_of_content: dict[bytes, str] = {}

    def pair(self, values: Values) -> LabeledPair | None:
        """None if its score is unclear. Raises UserError: The row cannot be used."""
        label = self._label(values)
        first = self._image(values, "image1")
        second = self._image(values, "image2")
        if first == second:
            raise UserError("image1 and image2 are the same image")
        theme = _text(values, "theme")
        self.shown.append([first, second, theme or ""])
        name = self._question_name or ("theme" if theme else "pair")
        if name not in self.questions:
            self.questions[name] = load_question(name, ("theme",))
        question = self.questions[name]
        if "theme" in question.fields and theme is None:
            raise UserError(f"it has no theme, which the question {name} asks about")
        reason = _text(values, "reason")
        if label is None:
            return None
        answer = None if reason is None else _answer(label, reason)
        text = question.text(theme=theme or "")
        return LabeledPair(first, second, text, label, "pair", group="", reason=answer)

    def _label(self, values: Values) -> bool | None:
        """The label, or the side of 1/2 on which the score is; None: it is too near."""
        label = _cell(values, "label")
        score = _cell(values, "score")
        if (label is None) == (score is None):
            raise UserError(f"it needs either a label or a score{_columns(values)}")
        if label is not None:
            if label.casefold() not in (*_YES, *_NO):
                raise UserError(f"label {label!r} is neither Yes nor No")
            return label.casefold() in _YES
        try:
            value = float(score)
        except ValueError:
            value = float("nan")
        if not 0 <= value <= 1:
            raise UserError(
                f"score {score} is not between 0 and 1; for scores of 1 to 5 write (score - 1) / 4"
            )
        largest_no = 0.5 - self._min_gap / 2
        least_yes = 0.5 + self._min_gap / 2
        if largest_no < value < least_yes:
            return None
        return value >= least_yes

    def _image(self, values: Values, column: str) -> str:
        """The name in the data set of the image in a column."""
        stated = _cell(values, column)
        if stated is None:
            raise UserError(f"it has no {column}{_columns(values)}")
        file = self._folder / stated
        if file in self._names:
            return self._names[file]
        if not file.is_file():
            raise UserError(f"{column} {file} does not exist; paths are relative to the file")
        # Copies of an image are one image: their pairs must not be on both sides of the split.
        digest = content_digest(load_image(file))
        name = self._name_of_content.setdefault(
            digest, f"pair_images/{digest.hex()[:16]}{file.suffix.lower()}"
        )
        self._names[file] = name
        self.images.setdefault(name, file)
        return name


def _cell(values: Values, column: str) -> str | None:
    """A value as text; None if it is missing or blank."""
    value = values.get(column)
    if value is None:
        return None
    if not isinstance(value, (str, int, float)):
        raise UserError(f"{column} is {value!r}, not a text or a number")
    return str(value).strip() or None


def _text(values: Values, column: str) -> str | None:
    """``_cell`` for a text that the model will see."""
    text = _cell(values, column)
    for token in (TAG, *RESERVED):
        if text is not None and token in text:
            raise UserError(f"{column} contains {token}, which stands for an image; remove it")
    return text


def _columns(values: Values) -> str:
    """What the row has, for messages about what it lacks."""
    names = ", ".join(values)
    return f" (the row has {names})" if names else ""


def _answer(label: bool, reason: str) -> str:
    """The answer to be learned: the verdict, then the reason."""
    verdict = "Yes" if label else "No"
    says_yes, sentences = split_verdict(reason)
    if says_yes not in (None, label):
        raise UserError(f"its reason does not say {verdict}, as its label does")
    return f"{verdict}. {sentences}" if sentences else verdict


def _rows(file: Path) -> list[Values]:
    """The values of each row by column. Raises UserError."""
    readers = {".csv": _csv_rows, ".jsonl": read_json_lines, ".json": _json_rows}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise UserError(f"{file} must be a .jsonl, .csv or .json file")
    rows = []
    for row in reader(file):
        rows.append({str(name).strip().casefold(): value for name, value in row.items()})
    if not rows:
        raise UserError(f"{file} holds no pairs")
    names = {name for values in rows for name in values}
    unused = sorted(names - set(COLUMNS))
    if unused:
        logger.warning("columns that are not used: %s", ", ".join(unused))
    return rows


def _csv_rows(file: Path) -> list[Values]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = list(csv.DictReader(text, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no CSV in UTF-8: {error}") from error
    for number, row in enumerate(rows, start=1):
        if None in row:
            raise UserError(
                f"{file} row {number} has more cells than the first line has names; put quotes "
                "around texts with commas"
            )
    return rows


def _json_rows(file: Path) -> list[Values]:
    try:
        rows = json.loads(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {error}") from error
    are_objects = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not are_objects:
        raise UserError(f'{file} must hold a list of pairs: [{{"image1": …}}, …]')
    return rows
