"""Reading the inputs: prompts with their images, rankings, edits, written reasons.

Every problem names its row.
Images of a prompt, the first of these that exists (``idx``: of its line in the metadata):

  grids         named in the line (``image``, ``file`` or ``images``), FOLDER/<idx>/*,
                FOLDER/<idx>.png and <idx>_*.png
  sub-figures   FOLDER/<idx>/<generation>/* in the order of their names
"""

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from paco_judge.errors import UserError
from paco_judge.files import read_json_lines
from paco_judge.grid import GridPrompt, split_prompt
from paco_judge.images import FORMATS
from paco_reward.datasets import RESERVED, TAG

_SUFFIXES = (".jpg", *(f".{name.lower()}" for name in FORMATS))


def _plain(text: str) -> str:
    if not text.strip() or any(token in text for token in (TAG, *RESERVED)):
        raise ValueError(f"is empty or contains {TAG}, {' or '.join(RESERVED)}")
    return text


def _prompt(text: str) -> str:
    split_prompt(_plain(text))  # panels must match the layout
    return text


Text = Annotated[str, AfterValidator(_plain)]
Files = Annotated[
    list[str],
    BeforeValidator(lambda files: files if isinstance(files, list) else [files] * bool(files)),
]


class Row(pydantic.BaseModel):
    """A line of an input file; other keys are ignored."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True)
    place: str = ""  # FILE row N


class PromptRow(Row):
    """A prompt; several lines may be generations of one. ``split``: where its theme goes."""

    prompt: Annotated[str, AfterValidator(_prompt)]
    idx: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    split: Literal["train", "test", ""] | None = None
    image: Files = []
    file: Files = []
    images: Files = []

    @property
    def files(self) -> list[str]:
        """The images that the line names. Tables write null into columns that are not used."""
        return self.image or self.file or self.images


class CandidateSet(Row):
    """A reference and its candidates; names are relative to the prompt's folder."""

    folder: str
    ref_image: str
    comp_images: list[str] | None = None


class Ranking(CandidateSet):
    """``rank_images``: the candidates, best first.

    ``scores``: P(Yes) in the same order, where a judge gave them.
    """

    rank_images: list[str] = Field(min_length=2)
    scores: list[float] | None = None

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
    reason: str


class EditRow(Row):
    """An edit (paths relative to the file).

    Labels: all else stayed consistent; the edit follows the instruction.
    """

    source: str
    edited: str
    instruction: Text
    consistency: bool | None = None
    follows: bool | None = None


AnyModel = TypeVar("AnyModel", bound=pydantic.BaseModel)
AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class PromptItem:
    """One prompt with its sub-figures, which are named inside the prompt's folder."""

    folder: str  # its idx
    prompt: str
    grid: GridPrompt
    place: str  # the row it was read from
    group: str  # of prompts that share a theme; train and test are split by it
    split: str | None  # train or test, where the metadata decides
    # By name: the file and the panel of it to be cut out (None: all of it).
    sources: dict[str, tuple[Path, int | None]]
    generations: list[list[str]]  # names of each one's panels, row-major


def read_rows(file: Path, kind: type[AnyRow]) -> list[AnyRow]:
    """All rows of a JSON-lines file. Raises UserError."""
    rows = []
    for number, values in enumerate(read_json_lines(file), start=1):
        place = f"{file} row {number}"
        try:
            rows.append(row_of(values | {"place": place}, kind))
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
    if not rows:
        raise UserError(f"{file} holds no rows")
    return rows


def row_of(values: dict[str, Any], kind: type[AnyModel]) -> AnyModel:
    """The values as a row. Raises UserError: The first of its problems."""
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            raise UserError(f"it has no {field}, but {', '.join(values)}") from error
        raise UserError(f"{field} {problem['msg']}, not {problem['input']!r}") from error


def read_prompts(metadata: Path, folder: Path, grids: bool) -> list[PromptItem]:
    """All prompts with their images; ``grids``: the folder holds grids, not sub-figures.

    Raises UserError.
    """
    prompts: dict[str, list[PromptRow]] = {}  # the lines of each, by idx
    for row in read_rows(metadata, PromptRow):
        prompts.setdefault(row.idx, []).append(row)
        first = prompts[row.idx][0]
        if (row.prompt, row.split) != (first.prompt, first.split):
            raise UserError(
                f"{row.place}: idx {row.idx} has another prompt or split than {first.place}"
            )
    items: list[PromptItem] = []
    themes: dict[str, PromptRow] = {}
    fitting = _fitting_prompts(folder, prompts) if grids else {}
    for idx, rows in prompts.items():
        row = rows[0]
        grid = split_prompt(row.prompt)
        first = themes.setdefault(" ".join(grid.theme.casefold().split()), row)
        if row.split != first.split:
            raise UserError(
                f"{row.place}: split {row.split!r}, but {first.split!r} for its theme "
                f"({first.place})"
            )
        if grids:
            files = _grid_files(rows, folder, fitting)
            sources, generations = _cut(files, len(grid.panels))
        else:
            sources, generations = _sub_figures(row, folder, len(grid.panels))
        items.append(
            PromptItem(idx, row.prompt, grid, row.place, first.idx, row.split, sources, generations)
        )
    _check_each_has_one_prompt(items)
    return items


def _check_each_has_one_prompt(items: Sequence[PromptItem]) -> None:
    """Refuse an image of two prompts: it would be labeled under a theme that is not its own."""
    prompt_of: dict[Path, PromptItem] = {}
    for item in items:
        for file, _ in item.sources.values():
            other = prompt_of.setdefault(file.resolve(), item)
            if other is not item:
                raise UserError(
                    f"{file} is an image of idx {other.folder} ({other.place}) and of idx "
                    f"{item.folder} ({item.place}); each prompt needs images of its own"
                )


def connected(keys: Sequence[Sequence[Hashable]]) -> list[int]:
    """For each entry the first one that shares a key with it, directly or through others."""
    numbers: dict[Hashable, int] = {}
    # A graph of keys with an edge from each entry's first key to each of its keys.
    starts = []
    ends = []
    for of_entry in keys:
        for key in of_entry:
            ends.append(numbers.setdefault(key, len(numbers)))
            starts.append(numbers[of_entry[0]])
    graph = coo_array((np.ones(len(ends)), (starts, ends)), shape=(len(numbers), len(numbers)))
    _, components = connected_components(graph, directed=False)
    firsts: dict[int, int] = {}
    groups = []
    for index, of_entry in enumerate(keys):
        component = int(components[numbers[of_entry[0]]])
        groups.append(firsts.setdefault(component, index))
    return groups


# ``sources`` and ``generations`` of a prompt.
Found = tuple[dict[str, tuple[Path, int | None]], list[list[str]]]


def _grid_files(
    rows: Sequence[PromptRow], folder: Path, fitting: Mapping[Path, Sequence[str]]
) -> list[Path]:
    """The grids of a prompt, one for each generation. Raises UserError."""
    idx = rows[0].idx
    place = rows[0].place
    named = [_existing(folder, file, row.place) for row in rows for file in row.files]
    files = list(dict.fromkeys(named)) or _images(folder / idx)
    if files:
        return files
    for file, prompts in fitting.items():
        if idx in prompts:
            files.append(file)
            if len(prompts) > 1:
                raise UserError(
                    f"{place}: the name of {file} fits the prompts {' and '.join(prompts)}; put "
                    f"their images into {folder}/<idx>/, or name them in the metadata"
                )
    if not files:
        raise UserError(f"{place}: no image in {folder} is named in the line, {idx}/* or {idx}_*")
    return files


def _fitting_prompts(folder: Path, all_idx: Collection[str]) -> dict[Path, list[str]]:
    """For each image in ``folder``, each idx for which it is <idx>.png, <idx>_* or <idx>-*."""
    fitting = {}
    for file in _images(folder):
        fitting[file] = []
        for match in re.finditer("[_-]|$", file.stem):
            if file.stem[: match.start()] in all_idx:
                fitting[file].append(file.stem[: match.start()])
    return fitting


def _cut(files: Sequence[Path], panels: int) -> Found:
    sources = {}
    generations = []
    for number, file in enumerate(files):
        generations.append([])
        for panel in range(panels):
            name = f"{number:02d}/{panel}.png"
            generations[-1].append(name)
            sources[name] = (file, panel)
    return sources, generations


def _sub_figures(row: PromptRow, folder: Path, panels: int) -> Found:
    prompt_folder = folder / row.idx
    sources = {}
    generations = []
    for part in sorted(path for path in prompt_folder.glob("*") if path.is_dir()):
        files = _images(part)
        if len(files) != panels:
            raise UserError(f"{row.place}: {part} has {len(files)} images for {panels} panels")
        generations.append([])
        for file in files:
            name = f"{part.name}/{file.name}"
            generations[-1].append(name)
            sources[name] = (file, None)
    if not generations:
        raise UserError(
            f"{row.place}: no sub-figures in {prompt_folder}: "
            f"put them at {prompt_folder}/<generation>/*.png"
        )
    return sources, generations


def _existing(folder: Path, name: str, place: str) -> Path:
    if not (folder / name).is_file():
        raise UserError(
            f"{place}: image {folder / name} does not exist; correct the line or the folder"
        )
    return folder / name


def _images(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.glob("*") if file.is_file() and file.suffix.lower() in _SUFFIXES
    )


def read_rankings(file: Path, items: Mapping[str, PromptItem]) -> list[Ranking]:
    """All rankings of a file. Raises UserError."""
    rankings = read_rows(file, Ranking)
    for row in rankings:
        _check_names(row, (row.ref_image, *row.rank_images), items)
    return rankings


def read_reasons(file: Path, items: Mapping[str, PromptItem]) -> dict[frozenset[str], ReasonRow]:
    """Reasons by the two images' paths in the data set. Raises UserError."""
    reasons = {}
    for row in read_rows(file, ReasonRow):
        _check_names(row, row.images, items)
        reasons[frozenset(f"images/{row.folder}/{name}" for name in row.images)] = row
    return reasons


def _check_names(
    row: Ranking | ReasonRow, images: Iterable[str], items: Mapping[str, PromptItem]
) -> None:
    if row.folder not in items:
        raise UserError(f"{row.place}: no prompt in the metadata has idx {row.folder}")
    known = items[row.folder].sources
    for name in images:
        if name not in known:
            shown = ", ".join(list(known)[:5])
            raise UserError(
                f"{row.place}: {name!r} is not a sub-figure of prompt {row.folder}; "
                f"known: {shown} …"
            )


def read_edits(file: Path, has_server: bool) -> list[EditRow]:
    """Edits with the paths of their images. Raises UserError."""
    edits = read_rows(file, EditRow)
    for row in edits:
        row.source = str(_existing(file.parent, row.source, row.place))
        row.edited = str(_existing(file.parent, row.edited, row.place))
        if row.consistency is None and row.follows is None and not has_server:
            raise UserError(
                f"{row.place} has no label (consistency or follows); add one, or name a --server"
            )
    return edits
