"""What a person looks at: contact sheets, images for a tracker, and tables."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from paco_grpo.monitoring.trackers import Tracker
from paco_judge.images import read_image

SHEET_CELL = 160  # pixels, longer side of an image in a contact sheet
_LINE, _GAP = 14, 4
_TRACKED_IMAGES = 8


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation's ``eval_data.jsonl``."""
    # bytes, because str.splitlines also splits at U+2028 in a prompt
    return [json.loads(line) for line in (folder / "eval_data.jsonl").read_bytes().splitlines()]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def thumbnail(image: Image.Image) -> Image.Image:
    """``image`` with its longer side at ``SHEET_CELL`` pixels, enlarged without smoothing."""
    scale = SHEET_CELL / max(image.size)
    filter_ = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))), filter_
    )


def contact_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str] = (),
    references: Sequence[Image.Image] = (),
) -> Image.Image:
    """Small copies of ``images`` in rows, numbered, with ``captions`` below and ``references`` on the left."""
    pictures = 2 if references else 1
    columns = max(1, math.ceil(math.sqrt(len(images) / pictures)))
    rows = max(1, math.ceil(len(images) / columns))
    step, line = SHEET_CELL + _GAP, _LINE if captions else 0
    width = pictures * step + (2 * _GAP if references else 0)
    sheet = Image.new("RGB", (columns * width, rows * (step + line)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        left, top = index % columns * width, index // columns * (step + line)
        for place, picture in enumerate([references[index], image] if references else [image]):
            sheet.paste(thumbnail(picture), (left + place * step, top))
        pen.text((left + 2, top + 2), str(index), fill="black")
        if captions:
            # longer text would run into the next cell
            pen.text((left + 2, top + step), captions[index][: (width - 4) // 6], fill="black")
    return sheet


def log_pictures(tracker: Tracker, folder: Path, epoch: int) -> None:
    """Send an evaluation's contact sheet, and its first images with prompts and scores, to the tracker."""
    if (folder / "sheet.png").is_file():  # otherwise no image was finite
        sheet = read_image(folder / "sheet.png")
        tracker.log_images("eval/sheet", [(sheet, f"first test items after epoch {epoch}")], epoch)
    shown = []
    for row in read_rows(folder)[:_TRACKED_IMAGES]:
        if row["file"] is not None:  # saved, and finite
            scores = ", ".join(
                f"{name} {'–' if v is None else format(v, '.3f')}"
                for name, v in row["rewards"].items()
            )
            shown.append((read_image(folder / row["file"]), f"{row['prompt']} ({scores})"))
    if shown:
        tracker.log_images("eval/images", shown, epoch)
