"""What a person looks at: contact sheets, images for a tracker, and tables."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from paco_grpo.monitoring.trackers import Tracker
from paco_judge.files import read_json_lines
from paco_judge.images import read_image

SHEET_CELL = 160  # pixels, longer side of an image in a contact sheet
_LINE = 14  # pixels of a line of text
_LETTER = 6  # pixels of a letter
_GAP = 4  # pixels between pictures
_TRACKED_IMAGES = 8


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation's ``eval_data.jsonl``."""
    return read_json_lines(folder / "eval_data.jsonl")


def thumbnail(image: Image.Image) -> Image.Image:
    """``image`` with its longer side at ``SHEET_CELL`` pixels, enlarged without smoothing."""
    scale = SHEET_CELL / max(image.size)
    filter_ = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    width = max(1, round(image.width * scale))
    height = max(1, round(image.height * scale))
    return image.resize((width, height), filter_)


def contact_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str] = (),
    references: Sequence[Image.Image] = (),
) -> Image.Image:
    """Small copies of ``images`` in rows, numbered.

    ``captions`` are below them, ``references`` on their left.
    """
    step = SHEET_CELL + _GAP
    width = 2 * step + 2 * _GAP if references else step  # of an image with its reference
    height = step + _LINE if captions else step
    columns = max(1, math.ceil(math.sqrt(len(images) / (2 if references else 1))))
    rows = max(1, math.ceil(len(images) / columns))
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        left = column * width
        top = row * height
        if references:
            sheet.paste(thumbnail(references[index]), (left, top))
        sheet.paste(thumbnail(image), (left + step if references else left, top))
        pen.text((left + 2, top + 2), str(index), fill="black")
        if captions:
            # Longer text would run into the next cell.
            caption = captions[index][: (width - 4) // _LETTER]
            pen.text((left + 2, top + step), caption, fill="black")
    return sheet


def log_pictures(tracker: Tracker, folder: Path, epoch: int) -> None:
    """Send an evaluation's contact sheet and its first images to the tracker."""
    if (folder / "sheet.png").is_file():  # otherwise no image was finite
        sheet = read_image(folder / "sheet.png")
        tracker.log_images("eval/sheet", [(sheet, f"first test items after epoch {epoch}")], epoch)
    tracked = []
    for row in read_rows(folder)[:_TRACKED_IMAGES]:
        if row["file"] is None:  # not saved, or not finite
            continue
        scores = []
        for name, score in row["rewards"].items():
            scores.append(f"{name} –" if score is None else f"{name} {score:.3f}")
        caption = f"{row['prompt']} ({', '.join(scores)})"
        tracked.append((read_image(folder / row["file"]), caption))
    if tracked:
        tracker.log_images("eval/images", tracked, epoch)
