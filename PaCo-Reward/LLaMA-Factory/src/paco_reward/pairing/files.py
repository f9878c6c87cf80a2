"""The files of a data set: images, rows, ``dataset_info.json``."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paco_judge.errors import UserError
from paco_judge.files import hash_value, read_json, write_json
from paco_judge.grid import split_image
from paco_judge.images import encode, load_image
from paco_reward.pairing.inputs import PromptItem
from paco_reward.pairing.select import LabeledPair

INDEX = "dataset_info.json"
TRAIN = "train"
TEST = "test"
PARTS = (TRAIN, TEST)
COT = "_cot"  # of data sets whose answers hold reasons

_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}


def stored(file: Path, output: Path) -> str:
    """Copy an edit's image to OUTPUT; returns the copy's name."""
    content = file.read_bytes()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    name = f"editing_images/{digest}{file.suffix.lower()}"
    write_image(output / name, content)
    return name


def claim(
    output: Path,
    inputs: Mapping[str, Any],
    rows: Mapping[str, list[list[str]]],
    name: str,
    continue_unknown: bool,
) -> None:
    """Record what a folder's parts are made from: nothing that was made of others is reused.

    Args:
        output: The folder.
        inputs: By the names of parts, values that JSON can hold. Images count by content.
        rows: Of the parts that further rows of their images may join: two images and the text.
        name: The part that --name names.
        continue_unknown: Trust that a part of an earlier version was made from these inputs.

    Raises:
        UserError: A part was made from something else, or the folder is somebody else's data set.
    """
    note = output / "work" / "inputs.json"
    known: dict[str, str] = {}
    if note.is_file():
        known = read_json(note)
    elif (output / INDEX).exists():
        raise UserError(
            f"{output} holds a data set that was not built here; choose another --output"
        )
    rows_file = output / "work" / "rows.json"
    known_rows = read_json(rows_file) if rows_file.is_file() else {}
    stated = {part: f"sha256:{hash_value(value)}" for part, value in inputs.items()}
    for part, digest in stated.items():
        before = known.get(part, digest)
        is_recorded = before.startswith("sha256:")
        if not is_recorded and not continue_unknown:
            raise UserError(
                f"{part} in {output} was built by an earlier version, so it is unknown whether "
                "from the same images; choose another --output, or pass --continue_unknown"
            )
        is_same = before == digest or _continues(known_rows.get(part, []), rows.get(part, []))
        if is_recorded and not is_same:
            options = "--output or --name" if part == name else "--output"
            raise UserError(
                f"{part} in {output} was built from other prompts or images; choose another "
                f"{options}, or delete the folder"
            )
    write_json(note, known | stated)
    for part, of_part in rows.items():
        known_of_part = known_rows.setdefault(part, [])
        seen = set(map(tuple, known_of_part))  # there may be 100,000
        for row in of_part:
            if tuple(row) not in seen:
                known_of_part.append(row)
    write_json(rows_file, known_rows)


def _continues(before: Sequence[list[str]], after: Sequence[list[str]]) -> bool:
    """Whether rows have images of earlier ones, and no pair of images has another text."""
    images: set[str] = set()
    for first, second, _ in before:
        images |= {first, second}
    texts: tuple[dict, dict] = ({}, {})
    for rows, of_pairs in zip((before, after), texts, strict=True):
        for first, second, text in rows:
            of_pairs.setdefault((first, second), set()).add(text)
    earlier, later = texts
    has_changed = any(not earlier[pair] <= later[pair] for pair in earlier.keys() & later.keys())
    is_related = any(first in images or second in images for first, second, _ in after)
    return is_related and not has_changed


def write_sub_figures(items: Sequence[PromptItem], output: Path) -> int:
    """Cut to OUTPUT/images/<idx>/ what is not there yet.

    Returns the number of all panels.
    """

    total = 0
    for item in items:
        for file, names in zip(item.files, item.generations, strict=True):
            targets = [output / "images" / item.folder / name for name in names]
            total += len(targets)
            if all(target.exists() for target in targets):
                continue
            try:
                panels = split_image(load_image(file), item.grid.rows, item.grid.cols)
            except ValueError as error:
                raise UserError(f"{item.place}: {file}: {error}") from error
            for target, panel in zip(targets, panels, strict=True):
                write_image(target, encode(panel))
    return total


def write_image(file: Path, content: bytes) -> None:
    """Write a file that is complete or absent, without waiting for the disk for each of many."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def write_datasets(
    output: Path, name: str, parts: Mapping[str, Sequence[LabeledPair]], images: str
) -> dict[str, dict[str, int]]:
    """NAME_PART.json for each part (ShareGPT), and their entries in dataset_info.json.

    Data sets that an earlier call made from the same inputs, with or without reasons, are removed:
    they were split otherwise. Those of other names stay.

    Args:
        output: The folder.
        name: Without ``_cot``.
        parts: Pairs by the part's name.
        images: Stands before each question.

    Returns:
        Counts of each data set.
    """
    index = output / INDEX
    info = read_json(index) if index.exists() else {}
    for old_name in (f"{name}{cot}_{part}" for cot in ("", COT) for part in PARTS):
        info.pop(old_name, None)
        (output / f"{old_name}.json").unlink(missing_ok=True)
    numbers = {}
    for part_name, pairs in parts.items():
        rows = []
        for pair in pairs:
            question = {"role": "user", "content": f"{images}{pair.question}"}
            answer = {"role": "assistant", "content": pair.reason or pair.verdict}
            rows.append({"messages": [question, answer], "images": [pair.first, pair.second]})
        write_json(output / f"{part_name}.json", rows)
        info[part_name] = {
            "file_name": f"{part_name}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": _TAGS,
        }
        yes = sum(pair.label for pair in pairs)
        numbers[part_name] = {
            "pairs": len(pairs),
            "yes": yes,
            "no": len(pairs) - yes,
            "groups": len({pair.group for pair in pairs}),
        }
    write_json(index, info)
    return numbers
