"""What people are asked: sets of `--sets_only`, a file of pairs, a file of edits."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.files import hash_value, read_json_lines, read_json_rows
from paco_judge.grid import split_prompt
from paco_judge.identity import fingerprint
from paco_reward.pairing.inputs import (
    CandidateSet,
    PlainText,
    Row,
    existing,
    read_edits,
    read_rows,
    row_of,
    theme_key,
)
from paco_reward.pairing.own_pairs import read_table
from paco_reward.pairing.select import order_key
from paco_reward.pairing.splits import Split, part_of_theme

SETS = "sets.jsonl"
SET = "set"
PAIR = "pair"
EDIT = "edit"
EDIT_LABELS = ("consistency", "follows")
PICTURES = {PAIR: ("image1", "image2"), EDIT: ("source", "edited")}  # columns of their paths
_MOST_CANDIDATES = 9  # a key each
_PEOPLES = {"label", "score", "reason", *EDIT_LABELS}  # columns that people's answers replace
_EVERY = 20  # of so many tasks one is asked again
_LEAST_BLOCK = 10  # fewer tasks have none

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One question to a person.

    Attributes:
        key: Known by the pictures' contents and the text: folders may move.
        kind: SET, PAIR or EDIT.
        pictures: A set's reference and candidates; a pair's two; the source and its edit.
        text: The theme or the instruction.
        row: The columns of the result without the answer: a set's names in its folder, or paths
            relative to the folder of the results, with what else the input file says.
        part: Of a set: TRAIN or TEST, by its theme.
    """

    key: str
    kind: str
    pictures: tuple[Path, ...]
    text: str
    row: Mapping[str, Any]
    part: str | None = None


class _PairRow(Row):
    image1: str
    image2: str
    theme: PlainText | None = None


def read_sets(folder: Path) -> list[Task]:
    """The sets that ``build-dataset --sets_only`` wrote to a folder. Raises UserError."""
    if not (folder / SETS).is_file():
        raise UserError(
            f"{folder} has no {SETS}: name the folder that `paco-reward build-dataset --sets_only` "
            "wrote"
        )
    themes = read_themes(folder)
    split = Split.read(folder)
    tasks = []
    for row in read_rows(folder / SETS, CandidateSet):
        candidates = row.comp_images or []
        if not 2 <= len(candidates) <= _MOST_CANDIDATES:
            raise UserError(
                f"{row.place}: a set needs 2 to {_MOST_CANDIDATES} candidates, this one has "
                f"{len(candidates)}"
            )
        names = (row.ref_image, *candidates)
        pictures = tuple(existing(folder / "images" / row.folder, name) for name in names)
        theme = themes[row.folder]
        part = part_of_theme(split, theme_key(theme), folder)
        stated = row.model_dump(exclude={"place"})
        key = _set_key(row.folder, names, pictures, theme)
        tasks.append(Task(key, SET, pictures, theme, stated, part))
    return tasks


def read_themes(folder: Path) -> dict[str, str]:
    """The theme of each prompt, by the name of its folder of panels."""
    themes = {}
    for row in read_json_lines(folder / "prompt_data.jsonl"):
        themes[row["idx"]] = split_prompt(row["prompt"]).theme
    return themes


def has_set(folder: Path, themes: Mapping[str, str], key: str, row: Mapping[str, Any]) -> bool:
    """Whether a set's pictures and theme are still those of its ``Task.key``, asked or not."""
    names = (row["ref_image"], *row["comp_images"])
    pictures = [folder / "images" / row["folder"] / name for name in names]
    if row["folder"] not in themes or not all(picture.is_file() for picture in pictures):
        return False
    return _set_key(row["folder"], names, pictures, themes[row["folder"]]) == key


def read_pairs(file: Path, output: Path) -> list[Task]:
    """The pairs of a file; both orders of two images are one task. Raises UserError.

    Args:
        file: As of ``build-dataset --pairs``. Labels in it are ignored, other columns kept.
        output: The folder of the results.
    """
    tasks = {}
    for number, values in enumerate(read_table(file), start=1):
        place = f"{file} row {number}"
        if None in values:
            raise UserError(f"{place} has too many cells: put quotes around texts with commas")
        try:
            row = row_of(values | {"place": place}, _PairRow)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        images = [existing(file.parent, name) for name in (row.image1, row.image2)]
        if _fingerprint(images[0]) == _fingerprint(images[1]):
            raise UserError(f"{row.place}: image1 and image2 are the same image")
        theme = row.theme or ""
        key = _pair_key(images, theme)
        stated = {"image1": _relative(images[0], output), "image2": _relative(images[1], output)}
        kept = _kept(values, stated)
        tasks.setdefault(key, Task(key, PAIR, tuple(images), theme, kept))
    return list(tasks.values())


def read_edits_of(file: Path, output: Path) -> list[Task]:
    """The edits of a file, as of ``build-dataset --editing``. Raises UserError."""
    tasks = {}
    edits = read_edits(file, has_server=True)  # labels are not needed
    for values, edit in zip(read_json_rows(file), edits, strict=True):
        images = (Path(edit.source), Path(edit.edited))
        key = _key(EDIT, images, edit.instruction)
        stated = {"source": _relative(images[0], output), "edited": _relative(images[1], output)}
        kept = _kept(values, stated)
        tasks.setdefault(key, Task(key, EDIT, images, edit.instruction, kept))
    return list(tasks.values())


def has_pictures(output: Path, kind: str, key: str, row: Mapping[str, Any]) -> bool:
    """Whether the pictures of a pair or an edit are still those of its ``Task.key``, asked or not.

    Paths in ``row`` lead from ``output``, the folder of the results.
    """
    pictures = [output / row[name] for name in PICTURES[kind]]
    if not all(picture.is_file() for picture in pictures):
        return False
    if kind == PAIR:
        return _pair_key(pictures, str(row.get("theme", ""))) == key
    return _key(EDIT, pictures, str(row["instruction"])) == key


def in_order(tasks: Sequence[Task], seed: int) -> list[tuple[Task, bool]]:
    """The tasks in the order in which each person gets them, and whether one is asked again.

    Sets come first, then pairs, then edits, each in a random order that is the same for all people,
    so that several have answered the first ones. One in twenty is asked again after some others.
    """
    order = []
    for kind in (SET, PAIR, EDIT):
        of_kind = [task for task in tasks if task.kind == kind]
        of_kind.sort(key=lambda task: order_key(seed, task.key))
        for start in range(0, len(of_kind), _EVERY):
            block = of_kind[start : start + _EVERY]
            order += [(task, False) for task in block]
            if len(block) >= _LEAST_BLOCK:
                first_half = block[: len(block) // 2]
                order.append(
                    (min(first_half, key=lambda task: order_key(seed, "again", task.key)), True)
                )
    return order


def shown_order(task: Task, name: str, again: bool) -> list[int]:
    """The candidates of a set in the order in which a person sees them."""
    candidates = range(1, len(task.pictures))
    return sorted(candidates, key=lambda index: order_key(0, task.key, name, again, index))


def _kept(values: Mapping[str | None, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that stay beside an answer, with paths that lead from the results."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name is not None and name not in _PEOPLES and value not in (None, ""):
            kept[name] = value
    return kept | stated


def _relative(picture: Path, output: Path) -> str:
    return os.path.relpath(picture.resolve(), output.resolve())


def _key(kind: str, pictures: Sequence[Path], text: str) -> str:
    return hash_value([kind, [_fingerprint(picture) for picture in pictures], text.strip()])[:16]


def _pair_key(pictures: Sequence[Path], theme: str) -> str:
    return _key(PAIR, sorted(pictures, key=_fingerprint), theme)  # in either order


def _set_key(folder: str, names: tuple[str, ...], pictures: Sequence[Path], theme: str) -> str:
    # Other sets may have the same pictures, by other names.
    return _key(f"{SET} {folder} {names}", pictures, theme)


@cache
def _fingerprint(picture: Path) -> str:
    return fingerprint(picture)
