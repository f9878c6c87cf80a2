"""Reading the inputs: prompts with their images, rankings, edits, written reasons. Every problem names its line.

A metadata line is a JSON object with ``prompt`` and optionally ``idx`` (the name of the prompt's folder; default: a
number). Several lines may be generations of one prompt. ``split`` (``train`` or ``test``) decides where its theme goes.
Its images, the first of these that applies:

  grids         named in the line (``image``, ``file`` or ``images``), else FOLDER/<idx>/*, else FOLDER/<idx>.png and
                FOLDER/<idx>_*.png, FOLDER/<idx>-*.png
  sub-figures   named in the line (``sub_figures``: the rows x cols files of one generation, row-major), else
                FOLDER/<idx>/<generation>/* (in the order of their names) and FOLDER/<idx>/* (of unknown generation)
"""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paco_judge.grid import PromptLayoutError, split_prompt
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.records import TEST, TRAIN, EditRow, Generation, PromptItem, Ranking

IMAGE_TAG = "<image>"
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EDIT_LABELS = {"yes": True, "no": False, "true": True, "false": False}
_LISTED = 5

PairKey = tuple[str, str, str]  # folder and the two images' names, sorted
Written = tuple[list[str], str]  # the two names in the order in which the reason mentions them, and the reason


def read_json_lines(file: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not empty; place is ``FILE line N``.

    Raises:
        PacoRewardError: Missing file, a line that is not a JSON object, or none at all.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would also split inside some texts
    except (OSError, UnicodeDecodeError) as error:
        raise PacoRewardError(f"{what} {file} cannot be read: {error}; check the path") from error
    if not any(line.strip() for line in lines):
        raise PacoRewardError(f"{what} {file} holds no lines")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file} line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PacoRewardError(f"{place} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise PacoRewardError(f"{place} is not a JSON object but {type(row).__name__}")
        yield place, row


@dataclass
class _Prompt:
    """A prompt while its lines are collected: texts it shares with others of its theme, and files named in lines."""

    item: PromptItem
    keys: set[str]
    named: list[list[str]] = field(default_factory=list)


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
    prompts: dict[str, _Prompt] = {}
    for place, line in read_json_lines(metadata, "metadata"):
        _add_line(prompts, place, line, grids)
    groups = connected([sorted(prompt.keys) for prompt in prompts.values()])
    firsts = list(prompts.values())
    items = []
    for prompt, group in zip(prompts.values(), groups, strict=True):
        first, item = firsts[group].item, prompt.item
        if item.split != first.split:
            raise PacoRewardError(
                f"{item.place} has split {item.split or '(none)'}, but {first.place}, which shares its theme, "
                f"{first.split or '(none)'}; give both the same"
            )
        found = _find_grids(prompt, folder) if grids else _find_sub_figures(prompt, folder)
        items.append(replace(found, group=first.folder))
    return items


def connected(keys: Sequence[Iterable[Hashable]]) -> list[int]:
    """Group of each entry, as the index of the group's first entry; entries with a common key share a group."""
    parent = list(range(len(keys)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    owner: dict[Hashable, int] = {}
    for index, own in enumerate(keys):
        for key in own:
            a, b = root(owner.setdefault(key, index)), root(index)
            parent[max(a, b)] = min(a, b)
    return [root(index) for index in range(len(keys))]


def _add_line(prompts: dict[str, _Prompt], place: str, line: dict[str, Any], grids: bool) -> None:
    text, split = line.get("prompt"), line.get("split") or ""
    if not isinstance(text, str) or not text.strip():
        raise PacoRewardError(f"{place} has no prompt; every line needs a text under 'prompt'")
    if IMAGE_TAG in text:
        raise PacoRewardError(f"{place}: the prompt contains {IMAGE_TAG}, which LLaMA-Factory reads as an image")
    if line.get("idx") is None:
        name = next((known for known, row in prompts.items() if row.item.prompt == text), f"{len(prompts):04d}")
    else:
        name = str(line["idx"])
    if not _SAFE_NAME.fullmatch(name):
        raise PacoRewardError(f"{place}: idx {name!r} cannot name a folder; use letters, digits, '.', '_' and '-'")
    if split not in ("", TRAIN, TEST):
        raise PacoRewardError(f"{place}: split is {TRAIN} or {TEST}, not {split!r}")
    if name not in prompts:
        try:
            grid = split_prompt(text)
        except PromptLayoutError as error:
            raise PacoRewardError(f"{place} (idx {name}): {error}; correct or remove the line") from error
        item = PromptItem(name, text, grid.theme, grid.rows, grid.cols, f"{place} (idx {name})", split=split)
        prompts[name] = _Prompt(item, {_normalized(text), _normalized(grid.theme)})
    prompt = prompts[name]
    if prompt.item.split != split:
        raise PacoRewardError(f"{place}: idx {name} already has another split ({prompt.item.place}); use one")
    if prompt.item.prompt != text:
        raise PacoRewardError(f"{place}: idx {name} already has another prompt ({prompt.item.place}); make idx unique")
    if isinstance(line.get("theme"), str) and line["theme"].strip():
        prompt.keys.add(_normalized(line["theme"]))
    fields = ("image", "file", "images") if grids else ("sub_figures",)
    named = next((line[key] for key in fields if line.get(key)), [])
    files = named if isinstance(named, list) else [named]
    if not all(isinstance(file, str) for file in files):
        raise PacoRewardError(f"{place}: image names must be strings, not {files!r}")
    if files:
        prompt.named.append(files)


def _normalized(text: str) -> str:
    return " ".join(text.casefold().split())


def _find_grids(prompt: _Prompt, folder: Path) -> PromptItem:
    item = prompt.item
    files = [_existing(folder, name, item.place) for names in prompt.named for name in names]
    files = files or _images(folder / item.folder)
    if not files:
        files = [f for f in _images(folder) if re.fullmatch(re.escape(item.folder) + r"([_-].*)?", f.stem)]
    if not files:
        raise PacoRewardError(
            f"{item.place} has no image in {folder}: name it in the line (image), or put it at "
            f"{item.folder}/*.png, {item.folder}.png or {item.folder}_*.png"
        )
    generations = [
        Generation((file,), tuple(f"{number:02d}/{panel}.png" for panel in range(item.panels)), True)
        for number, file in enumerate(dict.fromkeys(files))
    ]
    return replace(item, generations=tuple(generations))


def _find_sub_figures(prompt: _Prompt, folder: Path) -> PromptItem:
    item, own = prompt.item, folder / prompt.item.folder
    generations = []
    for number, names in enumerate(prompt.named):
        files = tuple(_existing(folder, name, item.place) for name in names)
        targets = tuple(f"{number:02d}/{panel}{file.suffix.lower()}" for panel, file in enumerate(files))
        generations.append(Generation(files, targets, False))
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
        if len(generation.files) != item.panels:
            name = generation.names[0].split("/")[0] if generation.names else "(empty folder)"
            raise PacoRewardError(
                f"{item.place}: its prompt has {item.rows}x{item.cols} = {item.panels} panels, but generation {name} "
                f"has {len(generation.files)} sub-figures; add the missing ones or remove the generation"
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
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in _SUFFIXES)


def read_rankings(file: Path, items: Mapping[str, PromptItem]) -> list[Ranking]:
    """All rankings of a file in ConsistencyRank's form, checked against the prompts' sub-figures.

    A line has ``folder`` (the prompt's idx), ``ref_image``, ``comp_images`` and ``rank_images`` (the same names, best
    first). ``sets.jsonl`` of an earlier run lists the names.

    Raises:
        PacoRewardError: A line is not a ranking, or names an unknown folder or image.
    """
    names = {folder: item.names() for folder, item in items.items()}
    rankings = []
    for place, row in read_json_lines(file, "rankings"):
        for key in ("folder", "ref_image", "rank_images"):
            if key not in row:
                raise PacoRewardError(
                    f"{place} has no {key}; a ranking has folder, ref_image, comp_images, rank_images"
                )
        reference, ranked = row["ref_image"], row["rank_images"]
        compared = row.get("comp_images", ranked)
        if not all(isinstance(value, list) and all(isinstance(n, str) for n in value) for value in (ranked, compared)):
            raise PacoRewardError(f"{place}: comp_images and rank_images must be lists of image names")
        if sorted(ranked) != sorted(compared) or len(set(ranked)) != len(ranked) or reference in ranked:
            raise PacoRewardError(
                f"{place}: rank_images {ranked} must be the comp_images {compared} in another order, each once and "
                f"without the reference {reference!r}"
            )
        if len(ranked) < 2:
            raise PacoRewardError(f"{place}: a ranking needs at least two candidates, not {len(ranked)}")
        folder = str(row["folder"])
        if folder not in names and folder.isdigit():
            folder = str(int(folder))  # the benchmark writes 0007 and 7
        _check_names(place, folder, (reference, *ranked), names)
        rankings.append(Ranking(folder, reference, tuple(ranked)))
    return rankings


def read_reasons(file: Path, items: Mapping[str, PromptItem]) -> dict[PairKey, Written]:
    """Human-written reasons: lines with ``folder`` (the prompt's idx), ``images`` and ``reason``.

    ``images`` are two of its names, in the order in which the reason mentions them ("the first shows …").

    Raises:
        PacoRewardError: A line lacks a field, names an unknown folder or image, or repeats a pair.
    """
    names = {folder: item.names() for folder, item in items.items()}
    found: dict[PairKey, Written] = {}
    for place, row in read_json_lines(file, "reasons"):
        folder, images, reason = str(row.get("folder")), row.get("images"), row.get("reason")
        if not (isinstance(images, list) and len(images) == 2 and isinstance(reason, str)):
            raise PacoRewardError(f"{place}: a line has folder, images (two names) and reason (a text)")
        _check_names(place, folder, images, names)
        key = (folder, *sorted(images))
        if key in found:
            raise PacoRewardError(f"{place}: the pair {images} of {folder} already has a reason; keep one of the two")
        found[key] = images, reason
    return found


def _check_names(place: str, folder: str, images: Iterable[str], names: Mapping[str, dict[str, None]]) -> None:
    def listed(known: Mapping[str, object]) -> str:
        shown = ", ".join(list(known)[:_LISTED])
        return f"{shown} … ({len(known)} in all)" if len(known) > _LISTED else shown

    if folder not in names:
        raise PacoRewardError(f"{place}: no prompt in the metadata has idx {folder}; known: {listed(names)}")
    for name in images:
        if name not in names[folder]:
            raise PacoRewardError(
                f"{place}: image {name!r} is not a sub-figure of prompt {folder}; known: {listed(names[folder])}"
            )


def read_edits(file: Path, has_server: bool) -> list[EditRow]:
    """Edits: lines with ``source``, ``edited`` (paths relative to the file) and ``instruction``.

    Known labels, each Yes or No or true or false: ``consistency`` (everything not mentioned stayed consistent) and
    ``follows`` (the edit follows the instruction).

    Raises:
        PacoRewardError: A line lacks a field, its image is missing, or it has no label and there is no server.
    """
    edits = []
    for place, row in read_json_lines(file, "editing rows"):
        for key in ("source", "edited", "instruction"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise PacoRewardError(f"{place} has no {key}; a row has source, edited and instruction, each a text")
        if IMAGE_TAG in row["instruction"]:
            raise PacoRewardError(
                f"{place}: the instruction contains {IMAGE_TAG}, which LLaMA-Factory reads as an image"
            )
        files = [file.parent / row[key] for key in ("source", "edited")]
        for path in files:
            if not path.is_file():
                raise PacoRewardError(f"{place}: image {path} does not exist; paths are relative to {file.parent}")
        labels = {}
        for key in ("consistency", "follows"):
            if row.get(key) is None:
                continue
            label = _EDIT_LABELS.get(str(row[key]).strip().casefold())
            if label is None:
                raise PacoRewardError(f"{place}: {key} must be Yes or No, not {row[key]!r}")
            labels[key] = label
        if not labels and not has_server:
            raise PacoRewardError(
                f"{place} has no label; add consistency or follows (Yes or No), or name a judge with --server"
            )
        edits.append(EditRow(place, *files, row["instruction"].strip(), labels))
    return edits
