"""Reading the inputs: prompts with their images, rankings, edits, written reasons. Every problem names its line.

A metadata line is a JSON object with ``prompt`` and optionally ``idx`` (the name of the prompt's folder; default: a
number). Several lines may be generations of one prompt. ``split`` (``train`` or ``test``) decides where its theme goes.
Its images, the first of these that applies:

  grids         named in the line (``image``, ``file`` or ``images``), else FOLDER/<idx>/*, else FOLDER/<idx>.png and
                FOLDER/<idx>_*.png, FOLDER/<idx>-*.png
  sub-figures   named in the line (``sub_figures``: the rows x cols files of one generation, row-major), else
                FOLDER/<idx>/<generation>/* (in the order of their names) and FOLDER/<idx>/* (of unknown generation)
"""

import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paco_judge.grid import PromptLayoutError, split_prompt
from paco_judge.json_io import DamagedJson, lines, parse_object
from paco_reward.datasets import RESERVED, TAG
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.records import TEST, TRAIN, EditRow, PromptItem, Ranking

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EDIT_LABELS = {"yes": True, "no": False, "true": True, "false": False}

PairKey = tuple[str, str, str]  # folder and the two images' names, sorted
Written = tuple[list[str], str]  # the two names in the order in which the reason mentions them, and the reason


def read_json_lines(file: Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not empty; place is ``FILE line N``.

    Raises:
        PacoRewardError: Missing file, a line that is not a JSON object, or none at all.
    """
    try:
        found = list(lines(file))
    except OSError as error:
        raise PacoRewardError(f"{what} {file} cannot be read: {error}; check the path") from error
    rows = []
    for number, line in found:
        try:
            rows.append((f"{file} line {number}", parse_object(line)))
        except DamagedJson as error:
            shown = line[:80].decode("utf-8", "replace")
            raise PacoRewardError(f"{file} line {number} is {error}; correct or remove it: {shown}") from error
    if not rows:
        raise PacoRewardError(f"{what} {file} holds no lines")
    return rows


def _text(place: str, row: Mapping[str, Any], key: str) -> str:
    text = row.get(key)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise PacoRewardError(f"{place} has no {key}; every line needs a text under {key!r}")
    if held := [token for token in (TAG, *RESERVED) if token in text]:
        raise PacoRewardError(f"{place}: the {key} contains {held[0]}, which stands for an image; remove it")
    return text


def read_prompts(metadata: Path, folder: Path, grids: bool) -> list[PromptItem]:
    """All prompts with the paths of their images; ``grids``: the folder holds grids, not sub-figures.

    Raises:
        PacoRewardError: A missing folder or image, a line without a prompt, a prompt whose panels do not match its
            layout, a generation with another number of sub-figures than its prompt has panels, or one theme in both
            splits.
    """
    if not folder.is_dir():
        option = "--grids" if grids else "--sub_figures"
        raise PacoRewardError(f"folder {folder} does not exist; point {option} at images")
    items: dict[str, PromptItem] = {}
    named: dict[str, list[list[Any]]] = {}  # files that lines name, by folder and generation
    themes: dict[str, list[str]] = {}
    for place, line in read_json_lines(metadata, "metadata"):
        item = _prompt(place, line, items)
        known = items.setdefault(item.folder, item)
        if (known.prompt, known.split) != (item.prompt, item.split):
            raise PacoRewardError(
                f"{place}: idx {item.folder} has another prompt or split ({known.place}); make it unique"
            )
        stated = [line["theme"]] if isinstance(line.get("theme"), str) and line["theme"].strip() else []
        texts = (" ".join(text.casefold().split()) for text in (item.prompt, item.theme, *stated))
        themes.setdefault(item.folder, []).extend(texts)
        fields = ("image", "file", "images") if grids else ("sub_figures",)
        files = next((line[key] for key in fields if line.get(key)), None)
        named.setdefault(item.folder, []).extend([files if isinstance(files, list) else [files]] if files else [])
    firsts: dict[Hashable, PromptItem] = {}
    found = []
    for item, group in zip(items.values(), connected(list(themes.values())), strict=True):
        first = firsts.setdefault(group, item)
        if item.split != first.split:
            raise PacoRewardError(
                f"{item.place} has split {item.split or '(none)'}, but {first.place}, which shares its theme, "
                f"{first.split or '(none)'}; give both the same"
            )
        images = _find_grids if grids else _find_sub_figures
        found.append(replace(images(item, named[item.folder], folder), group=first.folder))
    return found


def connected(keys: Sequence[Sequence[Hashable]]) -> list[Hashable]:
    """A key that names each entry's group; entries with a common key share a group, directly or through others."""
    parent: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for own in keys:
        for key in own[1:]:
            parent[root(key)] = root(own[0])
    return [root(own[0]) for own in keys]


def _prompt(place: str, line: dict[str, Any], known: Mapping[str, PromptItem]) -> PromptItem:
    """One metadata line, without its images."""
    text, split, name = _text(place, line, "prompt"), line.get("split") or "", line.get("idx")
    if name is None:
        name = next((item.folder for item in known.values() if item.prompt == text), f"{len(known):04d}")
    if not _SAFE_NAME.fullmatch(str(name)):
        raise PacoRewardError(f"{place}: idx {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
    if split not in ("", TRAIN, TEST):
        raise PacoRewardError(f"{place}: split is {TRAIN} or {TEST}, not {split!r}")
    place = f"{place} (idx {name})"
    try:
        grid = split_prompt(text)
    except PromptLayoutError as error:
        raise PacoRewardError(f"{place}: {error}; correct or remove the line") from error
    return PromptItem(str(name), text, grid.theme, grid.rows, grid.cols, place, split=split)


def _find_grids(item: PromptItem, named: Sequence[Sequence[Any]], folder: Path) -> PromptItem:
    files = [_existing(folder, name, item.place) for names in named for name in names] or _images(folder / item.folder)
    if not files:
        files = [f for f in _images(folder) if re.fullmatch(re.escape(item.folder) + r"([_-].*)?", f.stem)]
    if not files:
        raise PacoRewardError(
            f"{item.place} has no image in {folder}: name it in the line (image), or put it at "
            f"{item.folder}/*.png, {item.folder}.png or {item.folder}_*.png"
        )
    files = dict.fromkeys(files)
    generations = [tuple(f"{number:02d}/{panel}.png" for panel in range(item.panels)) for number in range(len(files))]
    sources = {name: (f, panel) for f, names in zip(files, generations) for panel, name in enumerate(names)}
    return replace(item, sources=sources, generations=tuple(generations))


def _find_sub_figures(item: PromptItem, named: Sequence[Sequence[Any]], folder: Path) -> PromptItem:
    own, loose = folder / item.folder, {}
    found: dict[str, dict[str, Path]] = {}  # of each generation, files by name
    for number, names in enumerate(named):
        files = [_existing(folder, name, item.place) for name in names]
        found[f"{number:02d}"] = {f"{number:02d}/{i}{file.suffix.lower()}": file for i, file in enumerate(files)}
    if not named and own.is_dir():
        for part in sorted(path for path in own.iterdir() if path.is_dir()):
            found[part.name] = {f"{part.name}/{file.name}": file for file in _images(part)}
        loose = {file.name: file for file in _images(own)}
    if not found and not loose:
        raise PacoRewardError(
            f"{item.place} has no sub-figures in {folder}: name them in the line (sub_figures), or put them at "
            f"{item.folder}/<generation>/*.png"
        )
    for name, files in found.items():
        if len(files) != item.panels:
            raise PacoRewardError(
                f"{item.place}: its prompt has {item.rows}x{item.cols} = {item.panels} panels, but generation {name} "
                f"has {len(files)} sub-figures; add the missing ones or remove the generation"
            )
    sources = {name: (file, None) for files in (*found.values(), loose) for name, file in files.items()}
    return replace(item, sources=sources, generations=tuple(map(tuple, found.values())))


def _existing(folder: Path, name: Any, place: str) -> Path:
    for file in (folder / str(name), Path(str(name))):
        if os.path.isfile(file):  # unlike Path.is_file also of names that are too long for a file
            return file
    raise PacoRewardError(f"{place}: image {folder / str(name)} does not exist; correct the line or the folder")


def _images(folder: Path) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if file.is_file() and file.suffix.lower() in _SUFFIXES)


def read_rankings(file: Path, items: Mapping[str, PromptItem]) -> list[Ranking]:
    """All rankings of a file in ConsistencyRank's form, checked against the prompts' sub-figures.

    A line has ``folder`` (the prompt's idx), ``ref_image``, ``comp_images`` and ``rank_images`` (the same names, best
    first). ``sets.jsonl`` of an earlier run lists the names.

    Raises:
        PacoRewardError: A line is not a ranking, or names an unknown folder or image.
    """
    rankings = []
    for place, row in read_json_lines(file, "rankings"):
        folder, reference, ranked = str(row.get("folder")), row.get("ref_image"), row.get("rank_images")
        compared = row.get("comp_images", ranked)
        lists = isinstance(ranked, list) and isinstance(compared, list)
        named = lists and all(isinstance(name, str) for name in (reference, *ranked, *compared))
        if not named or len({reference, *map(str, ranked)}) != len(ranked) + 1 or set(ranked) != set(compared):
            raise PacoRewardError(
                f"{place}: rank_images {ranked} must be the comp_images {compared}, best first, each once and without "
                f"the ref_image {reference!r}"
            )
        if len(ranked) < 2:
            raise PacoRewardError(f"{place}: a ranking needs at least two candidates, not {len(ranked)}")
        if folder not in items and folder.isdecimal():
            folder = folder.lstrip("0") or "0"  # the benchmark writes 0007 and 7
        _check_names(place, folder, (reference, *ranked), items)
        rankings.append(Ranking(folder, reference, tuple(ranked)))
    return rankings


def read_reasons(file: Path, items: Mapping[str, PromptItem]) -> dict[PairKey, Written]:
    """Human-written reasons: lines with ``folder`` (the prompt's idx), ``images`` and ``reason``.

    ``images`` are two of its names, in the order in which the reason mentions them ("the first shows …").

    Raises:
        PacoRewardError: A line lacks a field, names an unknown folder or image, or repeats a pair.
    """
    found: dict[PairKey, Written] = {}
    for place, row in read_json_lines(file, "reasons"):
        folder, images, reason = str(row.get("folder")), row.get("images"), row.get("reason")
        named = isinstance(images, list) and all(isinstance(name, str) for name in images)
        if not (named and len(images) == 2 and isinstance(reason, str)):
            raise PacoRewardError(f"{place}: a line has folder, images (two names) and reason (a text)")
        _check_names(place, folder, images, items)
        key = (folder, *sorted(images))
        if key in found:
            raise PacoRewardError(f"{place}: the pair {images} of {folder} already has a reason; keep one of the two")
        found[key] = images, reason
    return found


def _check_names(place: str, folder: str, images: Iterable[Any], items: Mapping[str, PromptItem]) -> None:
    if folder not in items:
        raise PacoRewardError(
            f"{place}: no prompt in the metadata has idx {folder}; known: {', '.join([*items][:5])} …"
        )
    for name in images:
        if name not in items[folder].sources:
            known = ", ".join([*items[folder].sources][:5])
            raise PacoRewardError(f"{place}: image {name!r} is not a sub-figure of prompt {folder}; known: {known} …")


def read_edits(file: Path, has_server: bool) -> list[EditRow]:
    """Edits: lines with ``source``, ``edited`` (paths relative to the file) and ``instruction``.

    Known labels, each Yes or No or true or false: ``consistency`` (everything not mentioned stayed consistent) and
    ``follows`` (the edit follows the instruction).

    Raises:
        PacoRewardError: A line lacks a field, its image is missing, or it has no label and there is no server.
    """
    edits = []
    for place, row in read_json_lines(file, "editing rows"):
        source, edited, instruction = (_text(place, row, key) for key in ("source", "edited", "instruction"))
        images = [_existing(file.parent, name, place) for name in (source, edited)]
        labels = {}
        for key in ("consistency", "follows"):
            label = _EDIT_LABELS.get(str(row.get(key)).strip().casefold())
            if label is None and row.get(key) is not None:
                raise PacoRewardError(f"{place}: {key} must be Yes or No, not {row[key]!r}")
            if label is not None:
                labels[key] = label
        if not labels and not has_server:
            raise PacoRewardError(
                f"{place} has no label; add consistency or follows (Yes or No), or name a judge with --server"
            )
        edits.append(EditRow(place, *images, instruction.strip(), labels))
    return edits
