"""Prompt sets: files become items, checked line by line (docs/method.md §2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from paco_grpo.data.editing import load_arrow_editing, load_geneval_image
from paco_grpo.data.files import DataError, common_fields, json_lines, text_of
from paco_grpo.types import Item
from paco_judge.grid import PromptLayoutError, split_prompt


def load_prompts(dataset: str | Path, split: str, kind: str = "geneval") -> list[Item]:
    """The items of one split of a prompt set.

    Args:
        dataset: Folder of the prompt set.
        split: ``train`` or ``test``.
        kind: ``geneval`` (``{split}_metadata.jsonl``), ``general_ocr`` or ``text`` (``{split}.txt``, one prompt a line),
            ``geneval_image`` (``{split}_metadata.jsonl`` with ``image``, a path from the dataset's folder) or
            ``arrow_editing`` (``{split}.arrow`` or ``{split}.parquet`` with ``prompt`` and ``image``).

    Raises:
        DataError: Missing folder or file, or an entry that is not valid.
    """
    folder = Path(dataset)
    if not folder.is_dir():
        public = folder.name.removeprefix("public-") if folder.name.startswith("public-") else ""
        fetch = f"Fetch it with `python dataset/fetch.py {public}`" if public else "Put its train and test files there"
        raise DataError(
            f"prompt set {str(dataset)!r} (config.dataset) is not a folder (looked from {Path.cwd()}). "
            f"{fetch}, or give another folder with --config.dataset=FOLDER"
        )
    items = KINDS[kind](folder, split)
    if not items:
        raise DataError(f"prompt set {folder} has no item in its {split} split")
    return items


def _geneval(folder: Path, split: str) -> list[Item]:
    items = []
    for where, row in json_lines(folder / f"{split}_metadata.jsonl"):
        name = f"{where} (item {row.get('idx', len(items))!r})"
        prompt, height, width = common_fields(row, name)
        criteria = row.get("criteria")
        named = criteria.values() if isinstance(criteria, dict) else [criteria]
        good = (isinstance(each, dict) and all(isinstance(text, str | None) for text in each.values()) for each in named)
        if criteria is not None and not all(good):
            raise DataError(f"{name}: field 'criteria' must look like {{dimension: {{name: text}}}}")
        try:
            grid = split_prompt(prompt)
        except PromptLayoutError as error:
            raise DataError(f"{name}: field 'prompt': {error}") from error
        layout = row.get("layout")
        if layout is not None and str(layout).lower().replace("⨉", "x").replace(" ", "") != f"{grid.rows}x{grid.cols}":
            raise DataError(f"{name}: field 'layout' is {layout!r} but the prompt says {grid.rows}x{grid.cols}")
        items.append(Item(len(items), prompt, height, width, metadata=dict(row)))
    return items


def _text(folder: Path, split: str) -> list[Item]:
    lines = text_of(folder / f"{split}.txt").splitlines()
    return [Item(item_id=number, prompt=line) for number, line in enumerate(filter(None, map(str.strip, lines)))]


KINDS: dict[str, Callable[[Path, str], list[Item]]] = {
    "geneval": _geneval,
    "general_ocr": _text,
    "text": _text,
    "geneval_image": load_geneval_image,
    "arrow_editing": load_arrow_editing,
}


def item_size(item: Item, resolution: int, mode: str) -> tuple[int, int]:
    """Height and width in pixels at which an item is generated, before rounding to the model's multiple.

    Args:
        item: Its height and width are used if it has them.
        resolution: Side of a square of the target area.
        mode: ``exact``: the item's size unchanged; ``aspect``: its shape at area ``resolution``².
    """
    if item.height is None or item.width is None:
        return resolution, resolution
    if mode == "exact":
        return item.height, item.width
    scale = resolution / math.sqrt(item.height * item.width)
    return round(item.height * scale), round(item.width * scale)


def round_to_multiple(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Both sides rounded to the nearest multiple, at least one multiple each."""
    return tuple(max(multiple, round(side / multiple) * multiple) for side in size)  # type: ignore[return-value]
