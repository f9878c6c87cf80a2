"""Writing the data set: sub-figures, and the files that LLaMA-Factory reads."""

import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from paco_judge.grid import split_image
from paco_judge.images import load_image
from paco_reward.errors import PacoRewardError, writing
from paco_reward.pairing.records import LabeledPair, PromptItem

logger = logging.getLogger(__name__)

_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file so that it is either complete or absent, however the process ends."""
    partial = file.with_name(file.name + ".partial")
    with writing(file):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            partial.replace(file)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def write_json(file: Path, value: Any) -> None:
    """Indented JSON."""
    write_atomically(file, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))


def copy(source: Path, target: Path) -> None:
    """Copy a file unless the target exists."""
    if not target.exists():
        write_atomically(target, source.read_bytes())


def write_sub_figures(items: Sequence[PromptItem], output: Path) -> int:
    """Cut grids into OUTPUT/images/<idx>/ and copy other sub-figures there, except for files that exist.

    Returns:
        The number of sub-figures of all items.

    Raises:
        PacoRewardError: An image cannot be read, or is too small for its prompt's layout.
    """
    for item in items:
        grid: tuple[Path, list[Image.Image]] | None = None  # the last one that was cut
        for name, (file, panel) in item.sources.items():
            target = output / "images" / item.folder / name
            if panel is None:
                copy(file, target)
            elif not target.exists():
                if grid is None or grid[0] != file:
                    try:
                        grid = file, split_image(load_image(file), item.rows, item.cols)
                    except ValueError as error:
                        raise PacoRewardError(f"{item.place}: {file}: {error}") from error
                buffer = io.BytesIO()
                grid[1][panel].save(buffer, format="PNG", compress_level=3)
                write_atomically(target, buffer.getvalue())
    count = sum(len(item.sources) for item in items)
    logger.info("sub-figures: %d of %d prompts in %s", count, len(items), output / "images")
    return count


def write_datasets(output: Path, datasets: Mapping[str, Sequence[LabeledPair]], images: str) -> None:
    """NAME.json for each data set (ShareGPT; image paths are relative to OUTPUT), and dataset_info.json.

    ``images``: what stands for the two images before each question.
    """
    info = {}
    for name, pairs in datasets.items():
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{images}{pair.question}"},
                    {"role": "assistant", "content": pair.answer},
                ],
                "images": [pair.first, pair.second],
            }
            for pair in pairs
        ]
        text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        write_atomically(output / f"{name}.json", f"[\n{text}\n]\n".encode())
        info[name] = {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": _TAGS,
        }
    write_json(output / "dataset_info.json", info)
