"""Labeled pairs of images that a user brings (`build-dataset --pairs FILE`).

FILE is .jsonl, .csv or .json, one pair in each row:

  image1, image2   image files, relative to FILE
  label            Yes or No (also true, false, 1, 0), or instead of it
  score            0 (not consistent) to 1
  theme, reason    optional: what both images are about, why the label is right
"""

import codecs
import csv
import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from paco_judge.images import content_digest, load_image
from paco_judge.json_io import DamagedJson, lines, parse
from paco_judge.questions import Question, load_question
from paco_reward.datasets import RESERVED, TAG
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.select import LabeledPair

COLUMNS = ("image1", "image2", "label", "score", "theme", "reason")
_YES = ("yes", "true", "1", "1.0")
_NO = ("no", "false", "0", "0.0")
# A verdict before a reason. "No difference can be seen" is a reason and has none.
_VERDICT = re.compile(r"[\"'“*_]*(yes|no)[\"'”*_]*\s*([.,:;!–—]|-\s|$)\s*", re.IGNORECASE)

logger = logging.getLogger(__name__)

Values = dict[str, Any]


@dataclass(frozen=True)
class OwnPairs:
    """The usable rows of a file."""

    pairs: list[LabeledPair]  # in the file's order, with images by their names in ``images``
    images: dict[str, Path]  # the name of each image in the data set, and where it is now
    questions: tuple[Question, ...]  # that the pairs are asked with


def read_pairs(file: Path, question_name: str | None, min_gap: float, counts: Counter) -> OwnPairs:
    """Read and check all rows and decode all images.

    Args:
        file: See above.
        question_name: Template or text file. None: ``theme``, or ``pair`` for rows without a theme.
        min_gap: Scores nearer to 1/2 than half of it are left out, and counted as ``unclear``.
        counts: Where the rows of each fate are counted.

    Raises:
        PacoRewardError: Names the first row that cannot be used, and how many more there are.
    """
    reader = _PairReader(file.parent, question_name, min_gap)
    pairs = []
    problems = []
    for place, values in tqdm(_rows(file), desc="pairs"):
        try:
            pair = reader.pair(values)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        counts["pairs"] += 1
        if pair is None:
            counts["unclear"] += 1
        else:
            pairs.append(pair)
    if problems:
        others = f" ({len(problems) - 1} more rows cannot be used)" if len(problems) > 1 else ""
        raise PacoRewardError(problems[0] + others)
    labels = {pair.label for pair in pairs}
    if len(labels) < 2:
        raise PacoRewardError(
            f"{file}: of {counts['pairs']} pairs {len(pairs)} have a clear label, all of them the "
            "same; the judge learns from as many Yes as No"
        )
    return OwnPairs(pairs, reader.images, tuple(reader.questions.values()))


class _PairReader:
    """Makes a labeled pair of a row's values."""

    def __init__(self, folder: Path, question_name: str | None, min_gap: float) -> None:
        self.images: dict[str, Path] = {}
        self.questions: dict[str, Question] = {}
        self._folder = folder
        self._question_name = question_name
        self._min_gap = min_gap
        self._names: dict[Path, str] = {}
        self._name_of_content: dict[bytes, str] = {}

    def pair(self, values: Values) -> LabeledPair | None:
        """None if its score is unclear. Raises PacoRewardError: The row cannot be used."""
        label = self._label(values)
        first = self._image(values, "image1")
        second = self._image(values, "image2")
        if first == second:
            raise PacoRewardError("image1 and image2 are the same image")
        theme = _text(values, "theme")
        name = self._question_name or ("theme" if theme else "pair")
        if name not in self.questions:
            self.questions[name] = load_question(name, ("theme",))
        question = self.questions[name]
        if "theme" in question.fields and theme is None:
            raise PacoRewardError(f"it has no theme, which the question {name} asks about")
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
            raise PacoRewardError(f"it needs either a label or a score{_columns(values)}")
        if label is not None:
            if label.casefold() not in (*_YES, *_NO):
                raise PacoRewardError(f"label {label!r} is neither Yes nor No")
            return label.casefold() in _YES
        try:
            value = float(score)
        except ValueError:
            value = float("nan")
        if not 0 <= value <= 1:
            raise PacoRewardError(
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
            raise PacoRewardError(f"it has no {column}{_columns(values)}")
        file = self._folder / stated
        if file in self._names:
            return self._names[file]
        if not file.is_file():
            raise PacoRewardError(f"{column} {file} does not exist; paths are relative to the file")
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
        raise PacoRewardError(f"{column} is {value!r}, not a text or a number")
    return str(value).strip() or None


def _text(values: Values, column: str) -> str | None:
    """``_cell`` for a text that the model will see."""
    text = _cell(values, column)
    for token in (TAG, *RESERVED):
        if text is not None and token in text:
            raise PacoRewardError(
                f"{column} contains {token}, which stands for an image; remove it"
            )
    return text


def _columns(values: Values) -> str:
    """What the row has, for messages about what it lacks."""
    names = ", ".join(values)
    return f" (the row has {names})" if names else ""


def _answer(label: bool, reason: str) -> str:
    """The answer to be learned: the verdict, then the reason."""
    verdict = "Yes" if label else "No"
    said = _VERDICT.match(reason)
    if said is None:
        return f"{verdict}. {reason}"
    if said[1].capitalize() != verdict:
        raise PacoRewardError(f"its reason says {said[1]}, but its label is {verdict}")
    return f"{verdict}. {reason[said.end() :]}".removesuffix(". ")


def _rows(file: Path) -> list[tuple[str, Values]]:
    """Where each row stands, and its values by column. Raises PacoRewardError."""
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows, ".json": _json_rows}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise PacoRewardError(f"{file} must be a .jsonl, .csv or .json file")
    rows = []
    for place, row in reader(file):
        if not isinstance(row, dict):
            raise PacoRewardError(f"{place} is {row!r}, not an object with {', '.join(COLUMNS)}")
        rows.append((place, {str(name).strip().casefold(): row[name] for name in row}))
    if not rows:
        raise PacoRewardError(f"{file} holds no pairs")
    _warn_of_unused(rows)
    return rows


def _warn_of_unused(rows: Sequence[tuple[str, Values]]) -> None:
    names = {name for _, values in rows for name in values}
    unused = sorted(names - set(COLUMNS))
    if unused:
        logger.warning("columns that are not used: %s", ", ".join(unused))


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PacoRewardError(f"{file} is not UTF-8 ({error}); save it as CSV UTF-8") from error
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in table:
            place = f"{file} line {table.line_num}"
            if None in row:
                raise PacoRewardError(
                    f"{place} has more cells than the first line has names; "
                    "put quotes around texts with commas"
                )
            yield place, row
    except csv.Error as error:
        raise PacoRewardError(f"{file} line {table.line_num} cannot be read: {error}") from error


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in lines(file):
        place = f"{file} line {number}"
        try:
            yield place, parse(line.removeprefix(codecs.BOM_UTF8))
        except DamagedJson as error:
            raise PacoRewardError(f"{place} is {error}") from error


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = parse(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    except DamagedJson as error:
        raise PacoRewardError(f"{file} is {error}") from error
    if not isinstance(rows, list):
        raise PacoRewardError(f'{file} must hold a list of pairs: [{{"image1": …}}, …]')
    for number, row in enumerate(rows, start=1):
        yield f"{file} row {number}", row
