"""The folder of an evaluation: its images, and pages of them."""

import io
import math
import os
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from accelerate.utils import gather_object
from PIL import Image, ImageDraw

from paco_grpo.types import Item
from paco_judge.files import write_atomically
from paco_judge.images import read_image

SHEET_CELL = 160  # pixels, longer side of an image in a contact sheet
_LINE = 14  # pixels of a line of text
_CAPTION_LINES = 4  # the prompt, and scores of three rewards
_GAP = 4  # pixels between pictures
_SHEET_IMAGES = 36
_REFERENCE_SIDE = 256  # pixels at most of the copies of reference images


class _Cell(NamedTuple):
    """A place in the contact sheet."""

    number: int
    image: Image.Image
    reference: Image.Image | None
    prompt: str


class EvaluationFolder:
    """Holds ``00000.png …`` and, for an editor, a small copy of each reference image.

    ``saves_images``: as ``config.test.save_eval_images``. Without it, only the contact sheet is
    written.

    Attributes:
        count: Images that this process added.
    """

    def __init__(self, path: Path, saves_images: bool = True) -> None:
        self.path = path
        self.saves_images = saves_images
        self.count = 0
        self._cells: list[_Cell] = []  # of this process

    def image_file(self, number: int) -> Path:
        """Where image ``number`` is, or would be."""
        return self.path / f"{number:05d}.png"

    def reference_file(self, number: int) -> Path:
        """Where the small copy of its reference image is, or would be."""
        return self.path / "references" / f"{number:05d}.png"

    def clear(self) -> None:
        """Remove the images of an earlier evaluation."""
        for file in self.path.glob("[0-9]*.png"):
            file.unlink()

    def read(self, number: int) -> Image.Image | None:
        """Image ``number``, if it was saved before."""
        file = self.image_file(number)
        return read_image(file) if file.is_file() else None

    def add(self, number: int, image: Image.Image, item: Item) -> None:
        """Save an image of ``item`` unless it is there, and show it in the sheet."""
        self.count += 1
        file = self.image_file(number)
        if self.saves_images and not file.exists():
            content = io.BytesIO()
            # Level 1: a smaller file would cost more time than writing a larger one.
            image.save(content, format="PNG", compress_level=1)
            write_atomically(file, content.getvalue())
        in_sheet = number < _SHEET_IMAGES
        reference = item.image if self.saves_images or in_sheet else None
        if self.saves_images and reference is not None:
            file = self.reference_file(number)
            file.parent.mkdir(exist_ok=True)
            copy = reference.copy()
            copy.thumbnail((_REFERENCE_SIDE, _REFERENCE_SIDE))
            copy.save(file)
        if in_sheet:
            small_reference = thumbnail(reference) if reference is not None else None
            self._cells.append(_Cell(number, thumbnail(image), small_reference, item.prompt))

    def write_sheet(self, is_main: bool, scores: Mapping[str, np.ndarray]) -> None:
        """Write ``sheet.png`` with the first images of all processes; a collective operation.

        ``scores``: reward → (images,), NaN = none; of the evaluation's images by number.
        """
        cells = sorted(gather_object(self._cells), key=attrgetter("number"))
        if not is_main or not cells:
            return
        numbers, images, references, prompts = zip(*cells, strict=True)
        captions = []
        for number, prompt in zip(numbers, _short(prompts), strict=True):
            lines = [f"{number}: {prompt}"]
            for name, values in scores.items():
                if not math.isnan(values[number]):
                    lines.append(f"{values[number]:.3f} {name}")
            captions.append("\n".join(lines[:_CAPTION_LINES]))
        if None in references:
            references = ()
        contact_sheet(images, captions, references).save(self.path / "sheet.png")


def _short(prompts: Sequence[str]) -> list[str]:
    """Prompts in one line, without the words with which all of them begin."""
    lines = [" ".join(prompt.split()) for prompt in prompts]
    if len(set(lines)) == 1:
        return lines
    shared = os.path.commonprefix(lines).rpartition(" ")[0]
    return [f"…{line.removeprefix(shared)}" if shared else line for line in lines]


def thumbnail(image: Image.Image) -> Image.Image:
    """``image`` with its longer side at ``SHEET_CELL`` pixels, enlarged without smoothing."""
    scale = SHEET_CELL / max(image.size)
    filter_ = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    width = max(1, round(image.width * scale))
    height = max(1, round(image.height * scale))
    return image.resize((width, height), filter_)


def contact_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str],
    references: Sequence[Image.Image] = (),
) -> Image.Image:
    """Small copies of ``images`` in rows.

    ``captions``, of one or more lines, are below them, ``references`` on their left.
    """
    step = SHEET_CELL + _GAP
    width = 2 * step + 2 * _GAP if references else step  # of an image with its reference
    height = step + _LINE * max(caption.count("\n") + 1 for caption in captions)
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
        for number, line in enumerate(captions[index].split("\n")):
            text = _fitting(pen, line, width - 2 * _GAP)
            pen.text((left + 2, top + step + number * _LINE), text, fill="black")
    return sheet


def _fitting(pen: ImageDraw.ImageDraw, line: str, width: int) -> str:
    """``line``, or its beginning: longer text would run into the next cell."""
    if pen.textlength(line) <= width:
        return line
    while pen.textlength(f"{line}…") > width:
        line = line[:-1]
    return f"{line}…"
