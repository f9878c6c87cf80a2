"""Labeled pairs of images that a user brings (`build-dataset --pairs FILE`).

FILE is .jsonl, .csv or .json, one pair in each row:

  image1, image2   image files, relative to FILE
  label            Yes or No (also true, false, 1, 0, 1.0, 0.0), or instead of it
  score            0 (not consistent) to 1
  theme, reason    optional: what both images are about, why the label is right
"""

import csv
import io
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
from pydantic import Field
from tqdm import tqdm

from paco_judge.errors import UserError
from paco_judge.files import read_json_rows, read_text
from paco_judge.images import content_digest, load_image
from paco_judge.questions import Question, load_question, shipped
from paco_reward.pairing.answers import split_verdict
from paco_reward.pairing.inputs import Label, PlainText, Problems, row_of
from paco_reward.pairing.select import LabeledPair

OF_SUSPECTS = ("chosen_by", "p_yes")  # columns of `paco-reward suspects`

logger = logging.getLogger(__name__)


class PairRow(pydantic.BaseModel):
    """A row of the file; other columns are ignored."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True, str_strip_whitespace=True)

    image1: str
    image2: str
    label: Label | None = None
    score: float | None = Field(None, ge=0, le=1)
    theme: PlainText | None = None
    reason: PlainText | None = None

    @pydantic.model_validator(mode="after")
    def _either(self) -> "PairRow":
        if (self.label is None) == (self.score is None):
            raise ValueError("needs either a label or a score")
        return self


@dataclass
class OwnPairs:
    """The usable rows of a file."""

    pairs: list[LabeledPair] = field(default_factory=list)  # images by their names in ``images``
    images: dict[str, Path] = field(default_factory=dict)  # by name in the data set: where it is
    questions: dict[str, Question] = field(default_factory=dict)  # that the pairs are asked with
    shown: list[list[str]] = field(default_factory=list)  # images and theme of every row
    counts: dict[str, int] = field(default_factory=dict)  # of rows by their fate
    _names: dict[Path | str, str] = field(default_factory=dict)  # by file, and by content

    def add(self, row: PairRow, folder: Path, question: str | None, min_gap: float) -> None:
        """Take a row in, unless its score is unclear. Raises UserError: It cannot be used."""
        first = self._image(folder / row.image1)
        second = self._image(folder / row.image2)
        if first == second:
            raise UserError("image1 and image2 are the same image")
        name = question or ("theme" if row.theme else "pair")
        if name not in self.questions:
            self.questions[name] = load_question(name, ("theme",))
        if "theme" in self.questions[name].fields and row.theme is None:
            raise UserError(f"it has no theme, which the question {name} asks about")
        self.shown.append([first, second, row.theme or ""])
        label = row.label
        if label is None:
            largest_no = 0.5 - min_gap / 2
            least_yes = 0.5 + min_gap / 2
            if largest_no < row.score < least_yes:
                return
            label = row.score >= least_yes
        text = self.questions[name].text(theme=row.theme or "")
        answer = None if row.reason is None else _answer(label, row.reason)
        kind = "pair" if name in shipped() else "own_question"  # of which the order may matter
        self.pairs.append(LabeledPair(first, second, text, label, kind, reason=answer))

    def _image(self, file: Path) -> str:
        """The name in the data set of an image."""
        if file not in self._names:
            if not file.is_file():
                raise UserError(
                    f"image {file} does not exist; paths are relative to the file of pairs"
                )
            # Copies of an image are one image: their pairs must not be on both sides of the split.
            digest = content_digest(load_image(file)).hex()[:16]
            name = f"pair_images/{digest}{file.suffix.lower()}"
            self._names[file] = self._names.setdefault(digest, name)
            self.images.setdefault(self._names[file], file)
        return self._names[file]


def read_pairs(file: Path, question_name: str | None, min_gap: float) -> OwnPairs:
    """Read and check all rows and decode all images.

    Args:
        file: See above.
        question_name: Template or text file. None: ``theme``, or ``pair`` for rows without a theme.
        min_gap: Scores nearer to 1/2 than half of it are left out, and counted as ``unclear``.

    Raises:
        UserError: Names the first rows that cannot be used, and how many more there are.
    """
    usable = OwnPairs()
    problems = Problems()  # all of them: each run decodes all images
    rows = read_table(file)
    unused = {name for row in rows for name in row} - {*PairRow.model_fields, *OF_SUSPECTS, None}
    if unused:
        logger.warning("%s: columns that are not used: %s", file, ", ".join(sorted(unused)))
    for number, values in enumerate(tqdm(rows, desc="pairs"), start=1):
        with problems.of(f"{file} row {number}"):
            if None in values:
                raise UserError("it has too many cells: put quotes around texts with commas")
            usable.add(row_of(values, PairRow), file.parent, question_name, min_gap)
    problems.raise_if_any()
    usable.counts = {"pairs": len(rows), "unclear": len(rows) - len(usable.pairs)}
    return usable


def _answer(label: bool, reason: str) -> str:
    """The answer to be learned: the verdict, then the reason."""
    verdict = "Yes" if label else "No"
    says_yes, sentences = split_verdict(reason)
    if says_yes not in (None, label):
        raise UserError(f"its label is {verdict}, but its reason begins with the other answer")
    return f"{verdict}. {sentences}" if sentences else verdict


def read_table(file: Path) -> list[dict[str | None, Any]]:
    """The values of each row of .csv, .jsonl or .json; cells without a column by None.

    Names of columns are in lower case. Raises UserError.
    """
    if file.suffix.lower() == ".csv":
        reader = csv.DictReader(io.StringIO(read_text(file)), strict=True, skipinitialspace=True)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise UserError(f"{file} line {reader.line_num} is not CSV: {error}") from error
    else:
        rows = read_json_rows(file)
    table = []
    for row in rows:
        table.append({name and name.strip().casefold(): value for name, value in row.items()})
    return table
