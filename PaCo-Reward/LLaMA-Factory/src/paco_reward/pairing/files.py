"""The files of a data set: images, rows, ``dataset_info.json``."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.grid import split_image
from paco_judge.images import encode, load_image
from paco_reward.errors import PacoRewardError
from paco_reward.pairing.inputs import PromptItem
from paco_reward.pairing.select import LabeledPair

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
    _write(output / name, content)
    return name


def write_images(images: Mapping[str, Path], output: Path) -> None:
    """Copy images, by their names in OUTPUT, that are not there yet. The names tell the content."""
    for name, file in images.items():
        if not (output / name).exists():
            _write(output / name, file.read_bytes())


def claim(output: Path, items: Sequence[PromptItem]) -> None:
    """Record the inputs of the output folder: nothing that was made of others is reused.

    Images count by name and content: a copy of them continues a run.
    """
    digests: dict[Path, str] = {}
    stated = []
    for item in items:
        for name, (file, _) in item.sources.items():
            if file not in digests:
                digests[file] = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
            stated.append([item.folder, item.prompt, name, file.name, digests[file]])
    digest = hashlib.blake2b(json.dumps(stated).encode(), digest_size=16).hexdigest()
    note = output / "work" / "inputs.txt"
    if not note.is_file() and (output / "dataset_info.json").exists():
        raise PacoRewardError(
            f"{output} holds a data set that was not built here; choose another --output"
        )
    if note.is_file() and note.read_text() != digest:
        raise PacoRewardError(
            f"{output} was built from other prompts or images; choose another --output, "
            "or delete it"
        )
    _write(note, digest)


def write_sub_figures(items: Sequence[PromptItem], output: Path) -> int:
    """Cut or copy to OUTPUT/images/<idx>/ what is not there yet.

    Returns the number of all sub-figures.
    """

    @lru_cache(maxsize=1)  # the panels of an image follow each other
    def cut(file: Path, rows: int, cols: int) -> list[Image.Image]:
        return split_image(load_image(file), rows, cols)

    for item in items:
        for name, (file, panel) in item.sources.items():
            target = output / "images" / item.folder / name
            if target.exists():
                continue
            try:
                if panel is None:
                    content = file.read_bytes()
                else:
                    content = encode(cut(file, item.grid.rows, item.grid.cols)[panel])
            except ValueError as error:
                raise PacoRewardError(f"{item.place}: {file}: {error}") from error
            _write(target, content)
    return sum(len(item.sources) for item in items)


def write_datasets(
    output: Path, datasets: Mapping[str, Sequence[LabeledPair]], images: str
) -> dict[str, dict[str, int]]:
    """NAME.json for each data set (ShareGPT), and dataset_info.json.

    ``images`` stands before each question.
    """
    info = {}
    numbers = {}
    for name, pairs in datasets.items():
        rows = []
        for pair in pairs:
            question = {"role": "user", "content": f"{images}{pair.question}"}
            answer = {"role": "assistant", "content": pair.reason or pair.verdict}
            rows.append({"messages": [question, answer], "images": [pair.first, pair.second]})
        write_json(output / f"{name}.json", rows)
        info[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": _TAGS,
        }
        yes = sum(pair.label for pair in pairs)
        numbers[name] = {
            "pairs": len(pairs),
            "yes": yes,
            "no": len(pairs) - yes,
            "groups": len({pair.group for pair in pairs}),
        }
    if info:
        write_json(output / "dataset_info.json", info)
    return numbers


def _write(file: Path, content: str | bytes) -> None:
    """Write a file that is complete or absent, however the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    partial.replace(file)


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    _write(file, "".join(json.dumps(row) + "\n" for row in rows))


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file for people, too."""
    _write(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
