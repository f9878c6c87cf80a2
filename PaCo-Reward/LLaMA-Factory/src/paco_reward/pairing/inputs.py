"""Reading the inputs: prompts with their images, rankings, edits, written reasons.

Every problem names its row.
Grid images of a prompt, the first of these that exists (``idx``: of its line in the metadata):
named in the line (``image``, ``file`` or ``images``), FOLDER/<idx>/*, FOLDER/<idx>.png
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from paco_judge.errors import UserError, first_problem
from paco_judge.files import read_json_rows
from paco_judge.grid import GridPrompt, split_prompt
from paco_judge.images import FORMATS
from paco_reward.datasets import PLACEHOLDERS

_SUFFIXES = (".jpg", *(f".{name.lower()}" for name in FORMATS))
_NAMED_ROWS = 20  # of those that cannot be used


def plain_text(text: str) -> str:
    """The text. Raises ValueError: A training would take a part of it for an image."""
    for placeholder in PLACEHOLDERS:
        if placeholder in text:
            raise ValueError(f"holds {placeholder}, which stands for an image; write it otherwise")
    return text


def _prompt(text: str) -> str:
    plain_text(split_prompt(text).theme)  # panels must match the layout
    return text


def _as_list(files: Any) -> Any:
    return files if isinstance(files, list) else [files]


def _as_label(value: Any) -> Any:
    """Tables with empty cells have 1.0 for 1."""
    return value.strip().removesuffix(".0") if isinstance(value, str) else value


PlainText = Annotated[str, AfterValidator(plain_text)]
Label = Annotated[bool, BeforeValidator(_as_label)]


def theme_key(theme: str) -> str:
    """What themes that differ in case and spaces have in common."""
    return " ".join(theme.casefold().split())


class Row(pydantic.BaseModel):
    """A line of an input file; other keys are ignored."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True)
    place: str = ""  # FILE row N


class PromptRow(Row):
    """A prompt; several lines may be generations of one. ``split``: where its theme goes."""

    prompt: Annotated[str, AfterValidator(_prompt)]
    idx: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    split: Literal["train", "test"] | None = None
    files: Annotated[list[str], BeforeValidator(_as_list)] = Field(
        [], validation_alias=AliasChoices("image", "file", "images")
    )


class CandidateSet(Row):
    """A reference and its candidates; names are relative to the prompt's folder."""

    folder: str
    ref_image: str
    comp_images: list[str] | None = None


class Ranking(CandidateSet):
    """``rank_images``: the candidates, best first.

    ``scores``: P(Yes) in the same order, where a judge gave them. ``equal``: candidates that a
    person found equal, neighbors in the order; they have no label where it depends on their order.
    """

    rank_images: list[str] = Field(min_length=2)
    scores: list[float] | None = None
    equal: list[list[str]] = []

    @model_validator(mode="after")
    def _each_once(self) -> "Ranking":
        are_different = len({self.ref_image, *self.rank_images}) == 1 + len(self.rank_images)
        candidates = self.comp_images or self.rank_images
        if not are_different or set(candidates) != set(self.rank_images):
            raise ValueError(
                "rank_images must be the comp_images, best first, each once and without the "
                "ref_image"
            )
        return self


class ReasonRow(Row):
    """A reason for a pair, and its images in the order in which it mentions them."""

    folder: str
    images: tuple[str, str]
    reason: PlainText = ""  # until it is written


class EditRow(Row):
    """An edit (paths relative to the file).

    Labels: all else stayed consistent; the edit follows the instruction.
    """

    source: str
    edited: str
    instruction: PlainText
    consistency: Label | None = None
    follows: Label | None = None


AnyModel = TypeVar("AnyModel", bound=pydantic.BaseModel)
AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class PromptItem:
    """One prompt with its panels, which are named inside the prompt's folder."""

    folder: str  # its idx
    prompt: str
    grid: GridPrompt
    place: str  # the row it was read from
    group: str  # of prompts that share a theme; train and test are split by it
    theme: str  # as ``theme_key`` writes it
    split: str | None  # train or test, where the metadata decides
    files: list[Path]  # the grids, one for each generation

    @property
    def generations(self) -> list[list[str]]:
        """The names of each generation's panels, row-major."""
        panels = range(len(self.grid.panels))
        names = []
        for number in range(len(self.files)):
            names.append([f"{number:02d}/{panel}.png" for panel in panels])
        return names


class Problems:
    """What is wrong with the rows of a file, so that one message names several of them."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    @contextmanager
    def of(self, place: str) -> Iterator[None]:
        """Keep the ValueError of the block, which is about the row at ``place``."""
        try:
            yield
        except ValueError as error:
            self.messages.append(f"{place}: {error}")

    def raise_if_any(self) -> None:
        """Raises UserError: Names the first ones, and how many more there are."""
        named = self.messages[:_NAMED_ROWS]
        if len(self.messages) > len(named):
            named.append(f"{len(self.messages) - len(named)} more rows cannot be used")
        if named:
            raise UserError("\n".join(named))


def read_rows(file: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """All rows of JSON lines or of a JSON list. Raises UserError."""
    rows = []
    problems = Problems()
    for number, values in enumerate(read_json_rows(file), start=1):
        place = f"{file} row {number}"
        with problems.of(place):
            rows.append(row_of(values | {"place": place}, kind))
    problems.raise_if_any()
    if not rows:
        raise UserError(f"{file} holds no rows")
    return rows


def row_of(values: Mapping[str, Any], kind: type[AnyModel]) -> AnyModel:
    """The values as a row. Raises UserError: The first of its problems.

    Tables write null or nothing into columns that are not used.
    """
    stated = {}
    for name, value in values.items():
        is_blank = isinstance(value, str) and not value.strip()
        if value is not None and not is_blank:
            stated[name] = value
    try:
        return kind.model_validate(stated)
    except pydantic.ValidationError as error:
        raise UserError(first_problem(error)) from error


def read_prompts(metadata: Path, folder: Path) -> list[PromptItem]:
    """All prompts with their images. Raises UserError."""
    problems = Problems()
    prompts: dict[str, list[PromptRow]] = {}  # the lines of each, by idx
    for row in read_rows(metadata, PromptRow):
        prompts.setdefault(row.idx, []).append(row)
        first = prompts[row.idx][0]
        with problems.of(row.place):
            if (row.prompt, row.split) != (first.prompt, first.split):
                raise UserError(f"idx {row.idx} has another prompt or split than {first.place}")
            for name in row.files:
                existing(folder, name)
    problems.raise_if_any()
    items: list[PromptItem] = []
    themes: dict[str, PromptRow] = {}
    owners: dict[Path, PromptRow] = {}  # the prompt of each image
    for lines in prompts.values():
        with problems.of(lines[0].place):
            items.append(_item(lines, folder, themes, owners))
    problems.raise_if_any()
    return items


def _item(
    lines: list[PromptRow],
    folder: Path,
    themes: dict[str, PromptRow],
    owners: dict[Path, PromptRow],
) -> PromptItem:
    """The prompt of lines with one idx. Raises UserError.

    ``themes`` and ``owners``: the first row of each theme, the row of each image.
    """
    row = lines[0]
    idx = row.idx
    grid = split_prompt(row.prompt)
    theme = theme_key(grid.theme)
    first = themes.setdefault(theme, row)
    if row.split != first.split:
        raise UserError(f"split {row.split!r}, but {first.split!r} for its theme ({first.place})")
    named = []
    for line in lines:
        named += [folder / name for name in line.files]
    in_folder = sorted((folder / idx).glob("*"))
    alone = [folder / f"{idx}{suffix}" for suffix in _SUFFIXES]
    files = list(dict.fromkeys(named)) or _images(in_folder) or _images(alone)
    if not files:
        raise UserError(f"no image in {folder} is named in the line or {idx}/*")
    for file in files:
        owner = owners.setdefault(file.resolve(), row)
        if owner.idx != idx:  # it would be labeled under a theme that is not its own
            raise UserError(f"{file} is an image of idx {owner.idx}, too")
    return PromptItem(idx, row.prompt, grid, row.place, first.idx, theme, row.split, files)


def existing(folder: Path, name: str) -> Path:
    """The path of a file that a row names. Raises UserError: It does not exist."""
    if not (folder / name).is_file():
        raise UserError(f"image {folder / name} does not exist; correct the line or the folder")
    return folder / name


def _images(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.is_file() and file.suffix.lower() in _SUFFIXES]


def read_rankings(file: Path, items: Mapping[str, PromptItem]) -> list[Ranking]:
    """All rankings of a file. Raises UserError."""
    rankings = read_rows(file, Ranking)
    problems = Problems()
    for row in rankings:
        with problems.of(row.place):
            _check_names(row.folder, (row.ref_image, *row.rank_images), items)
    problems.raise_if_any()
    return rankings


def read_reasons(file: Path, items: Mapping[str, PromptItem]) -> dict[frozenset[str], ReasonRow]:
    """Reasons by the two images' paths in the data set. Raises UserError."""
    reasons = {}
    problems = Problems()
    for row in read_rows(file, ReasonRow):
        with problems.of(row.place):
            _check_names(row.folder, row.images, items)
        if row.reason:
            reasons[frozenset(f"images/{row.folder}/{name}" for name in row.images)] = row
    problems.raise_if_any()
    return reasons


def _check_names(folder: str, images: Iterable[str], items: Mapping[str, PromptItem]) -> None:
    if folder not in items:
        raise UserError(f"no prompt in the metadata has idx {folder}")
    known = list(chain(*items[folder].generations))
    for name in images:
        if name not in known:
            raise UserError(
                f"{name!r} is not a panel of prompt {folder}; known: {', '.join(known[:5])} …"
            )


def read_edits(file: Path, has_server: bool) -> list[EditRow]:
    """Edits with the paths of their images. Raises UserError."""
    edits = read_rows(file, EditRow)
    problems = Problems()
    for row in edits:
        with problems.of(row.place):
            row.source = str(existing(file.parent, row.source))
            row.edited = str(existing(file.parent, row.edited))
            if row.consistency is None and row.follows is None and not has_server:
                raise UserError("it has no label (consistency or follows); add one, or a --server")
    problems.raise_if_any()
    return edits
