"""The data kind geneval_image, where the data room does not have it yet."""

import dataclasses
from pathlib import Path

from PIL import Image

from paco_grpo.data import prompts


def ensure_geneval_image() -> None:
    """Register a reader of ``{split}_metadata.jsonl`` with ``image`` paths, unless there is one."""
    prompts.KINDS.setdefault("geneval_image", _read)


def _read(folder: Path, split: str):
    items = []
    for item in prompts.KINDS["geneval"](folder, split):
        with Image.open(folder / item.metadata["image"]) as image:
            items.append(dataclasses.replace(item, image=image.convert("RGB")))
    return items
