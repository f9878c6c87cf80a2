"""Prompts and where their images are: a metadata file beside a folder of grids, or of sub-figures already cut.

A metadata line is a JSON object with ``prompt`` and, where it has one, ``idx`` (the name of the prompt's folder; default:
a number). Several lines may be generations of one prompt. ``split`` (``train`` or ``test``) decides where its theme goes;
else the seed does. Its images, the first of these that applies:

  grids         named in the line (``image``, ``file`` or ``images``), else FOLDER/<idx>/*, else FOLDER/<idx>.png and
                FOLDER/<idx>_*.png, FOLDER/<idx>-*.png
  sub-figures   named in the line (``sub_figures``: the rows x cols files of one generation, row-major), else
                FOLDER/<idx>/<generation>/* (in the order of their names) and FOLDER/<idx>/* (of unknown generation)
"""

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paco_judge.grid import PromptLayoutError, split_prompt
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.records import Generation, PromptItem
from paco_reward.pairing.split import TEST, TRAIN, connected

IMAGE_TAG = "<image>"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass
class _Row:
    """A prompt while its lines are collected."""

    item: PromptItem
    keys: set[str]
    named: list[list[str]] = field(default_factory=list)


def read_json_lines(file: Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not empty; place is ``FILE line N``.

    Raises:
        PacoRewardError: missing file, a line that is not a JSON object, or none at all.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would also split inside some texts
    except (OSError, UnicodeDecodeError) as error:
        raise PacoRewardError(f"{what} {file} cannot be read: {error}; check the path") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PacoRewardError(f"{place} is not JSON ({error}); each line of {what} is one JSON object") from error
        if not isinstance(row, dict):
            raise PacoRewardError(f"{place} is not a JSON object but {type(row).__name__}")
        rows.append((place, row))
    if not rows:
        raise PacoRewardError(f"{what} {file} holds no lines")
    return rows


def read_prompts(metadata: Path, folder: Path, grids: bool) -> list[PromptItem]:
    """All prompts with their images; ``grids``: what the folder holds. Images are looked for, not opened.

    Raises:
        PacoRewardError: the folder is missing; a line is not JSON, has no prompt, or one whose panels differ from its
            layout; an image is missing, or a generation has not as many sub-figures as its prompt has panels.
    """
    if not folder.is_dir():
        raise PacoRewardError(
            f"folder {folder} does not exist; point --{'grids' if grids else 'sub_figures'} at images"
        )
    rows: dict[str, _Row] = {}
    for place, line in read_json_lines(metadata, "metadata"):
        _add_line(rows, place, line, grids)
    groups = connected([sorted(row.keys) for row in rows.values()])
    first = [row.item.folder for row in rows.values()]
    _check_splits([row.item for row in rows.values()], groups)
    find = _grids if grids else _sub_figures
    return [replace(find(row, folder), group=first[group]) for row, group in zip(rows.values(), groups, strict=True)]


def _check_splits(items: list[PromptItem], groups: list[int]) -> None:
    """One theme is not for training and for testing."""
    decided: dict[int, PromptItem] = {}
    for item, group in zip(items, groups, strict=True):
        other = decided.setdefault(group, item)
        if item.split != other.split:
            raise PacoRewardError(
                f"{item.place} has split {item.split or '(none)'}, but {other.place}, which shares its theme, "
                f"{other.split or '(none)'}; give both the same"
            )


def _add_line(rows: dict[str, _Row], place: str, line: dict[str, Any], grids: bool) -> None:
    prompt = line.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise PacoRewardError(f"{place} has no prompt; every line needs a text under 'prompt'")
    if IMAGE_TAG in prompt:
        raise PacoRewardError(f"{place}: the prompt contains {IMAGE_TAG}, which LLaMA-Factory takes for an image")
    if line.get("idx") is None:
        name = next((known for known, row in rows.items() if row.item.prompt == prompt), f"{len(rows):04d}")
    else:
        name = str(line["idx"])
    if not _SAFE_NAME.fullmatch(name):
        raise PacoRewardError(f"{place}: idx {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
    part = line.get("split") or ""
    if part not in ("", TRAIN, TEST):
        raise PacoRewardError(f"{place}: split is {TRAIN} or {TEST}, not {part!r}")
    if name not in rows:
        try:
            grid = split_prompt(prompt)
        except PromptLayoutError as error:
            raise PacoRewardError(f"{place} (idx {name}): {error}; correct the prompt or take the line out") from error
        item = PromptItem(name, prompt, grid.theme, grid.rows, grid.cols, f"{place} (idx {name})", split=part)
        rows[name] = _Row(item, {_normal(prompt), _normal(grid.theme)})
    row = rows[name]
    if row.item.split != part:
        raise PacoRewardError(f"{place}: idx {name} has another split before ({row.item.place}); give both the same")
    if row.item.prompt != prompt:
        raise PacoRewardError(f"{place}: idx {name} is already another prompt's ({row.item.place}); idx must be unique")
    if isinstance(line.get("theme"), str) and line["theme"].strip():
        row.keys.add(_normal(line["theme"]))
    row.named.extend(_named(line, place, grids))


def _named(line: dict[str, Any], place: str, grids: bool) -> list[list[str]]:
    """The generations that a line names: for each its files."""
    found = [line[key] for key in (("image", "file", "images") if grids else ("sub_figures",)) if line.get(key)]
    if not found:
        return []
    names = found[0] if isinstance(found[0], list) else [found[0]]
    if not all(isinstance(name, str) for name in names):
        raise PacoRewardError(f"{place}: image names must be texts, not {names!r}")
    return [[name] for name in names] if grids else [names]


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def _grids(row: _Row, folder: Path) -> PromptItem:
    item = row.item
    files = [_existing(folder, name, item.place) for names in row.named for name in names]
    files = files or _images(folder / item.folder)
    if not files:
        alike = [f for f in _images(folder) if re.fullmatch(re.escape(item.folder) + r"([_-].*)?", f.stem)]
        files = alike
    if not files:
        raise PacoRewardError(
            f"{item.place} has no image in {folder}: name it in the line (image), or put it at "
            f"{item.folder}/*.png, {item.folder}.png or {item.folder}_*.png"
        )
    panels = item.rows * item.cols
    made = [
        Generation((file,), tuple(f"{number:02d}/{panel}.png" for panel in range(panels)), True)
        for number, file in enumerate(dict.fromkeys(files))
    ]
    return replace(item, generations=tuple(made))


def _sub_figures(row: _Row, folder: Path) -> PromptItem:
    item, own = row.item, folder / row.item.folder
    generations = []
    for number, names in enumerate(row.named):
        files = tuple(_existing(folder, name, item.place) for name in names)
        called = tuple(f"{number:02d}/{panel}{file.suffix.lower()}" for panel, file in enumerate(files))
        generations.append(Generation(files, called, False))
    loose: list[tuple[str, Path]] = []
    if not generations and own.is_dir():
        for part in sorted(path for path in own.iterdir() if path.is_dir()):
            files = tuple(_images(part))
            generations.append(Generation(files, tuple(f"{part.name}/{file.name}" for file in files), False))
        loose = [(file.name, file) for file in _images(own)]
    if not generations and not loose:
        raise PacoRewardError(
            f"{item.place} has no sub-figures in {folder}: name them in the line (sub_figures), or put them at "
            f"{item.folder}/<generation>/*.png"
        )
    for generation in generations:
        if len(generation.files) != item.rows * item.cols:
            raise PacoRewardError(
                f"{item.place}: its prompt has {item.rows}x{item.cols} = {item.rows * item.cols} panels, but generation "
                f"{generation.names[0].split('/')[0] if generation.names else '(empty folder)'} has "
                f"{len(generation.files)} sub-figures; add what is missing or remove the generation"
            )
    return replace(item, generations=tuple(generations), loose=tuple(loose))


def _existing(folder: Path, name: str, place: str) -> Path:
    for file in (folder / name, Path(name)):
        if file.is_file():
            return file
    raise PacoRewardError(f"{place}: image {folder / name} does not exist; correct the line or the folder")


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
