"""Grids become sub-figures under OUTPUT/images/<idx>/; sub-figures already cut are copied there."""

import io
import logging
from collections.abc import Sequence
from pathlib import Path

from paco_judge.grid import split_image
from paco_reward.errors import PacoRewardError
from paco_reward.images import open_image
from paco_reward.pairing.journal import write_atomically
from paco_reward.pairing.records import Generation, PromptItem

logger = logging.getLogger(__name__)


def write_sub_figures(items: Sequence[PromptItem], output: Path) -> int:
    """Write what is not there yet, each file whole or not at all.

    Returns:
        The number of sub-figures of all items.

    Raises:
        PacoRewardError: an image cannot be read, or is too small for its prompt's layout; names it.
    """
    count = 0
    for item in items:
        folder = output / "images" / item.folder
        for generation in item.generations:
            if generation.is_grid:
                _cut(generation, item, folder)
            else:
                for name, file in zip(generation.names, generation.files, strict=True):
                    copy(file, folder / name)
        for name, file in item.loose:
            copy(file, folder / name)
        count += len(item.names())
    logger.info("sub-figures: %d of %d prompts in %s", count, len(items), output / "images")
    return count


def copy(source: Path, target: Path) -> None:
    """Copy a file as it is, unless it is there."""
    if not target.exists():
        write_atomically(target, source.read_bytes())


def _cut(generation: Generation, item: PromptItem, folder: Path) -> None:
    if all((folder / name).exists() for name in generation.names):
        return
    try:
        panels = split_image(open_image(generation.files[0]), item.rows, item.cols)
    except ValueError as error:
        raise PacoRewardError(f"{item.place}: {generation.files[0]}: {error}") from error
    for name, panel in zip(generation.names, panels, strict=True):
        buffer = io.BytesIO()
        panel.save(buffer, format="PNG", compress_level=3)
        write_atomically(folder / name, buffer.getvalue())
