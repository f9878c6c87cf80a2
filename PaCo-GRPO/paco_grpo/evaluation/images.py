"""The images of an evaluation: files in its folder, and small copies for the contact sheet."""

from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from accelerate.utils import gather_object
from PIL import Image

from paco_grpo.evaluation.pictures import contact_sheet, thumbnail
from paco_grpo.types import Item
from paco_judge.images import UnreadableImage, read_image

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
    """

    def __init__(self, path: Path, saves_images: bool = True) -> None:
        self.path = path
        self.saves_images = saves_images
        self._cells: list[_Cell] = []  # of this process

    def image_file(self, number: int) -> Path:
        """Where image ``number`` is, or would be."""
        return self.path / f"{number:05d}.png"

    def reference_file(self, number: int) -> Path:
        """Where the small copy of its reference image is, or would be."""
        return self.path / "references" / f"{number:05d}.png"

    def read(self, number: int) -> Image.Image | None:
        """Image ``number`` of this or an earlier evaluation; None if it is missing or damaged."""
        file = self.image_file(number)
        try:
            return read_image(file) if file.is_file() else None
        except UnreadableImage:
            return None

    def save(self, number: int, image: Image.Image) -> None:
        """Write image ``number``, so that a kill leaves no half of it."""
        if not self.saves_images:
            return
        file = self.image_file(number)
        partial = file.with_suffix(".tmp")
        # Level 1: a smaller file would cost more time than writing a larger one.
        image.save(partial, format="PNG", compress_level=1)
        partial.replace(file)

    def show(self, number: int, image: Image.Image, item: Item) -> None:
        """Save the reference image of ``item``, and take a small copy of both for the sheet."""
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

    def write_sheet(self, is_main: bool) -> None:
        """Write ``sheet.png`` with the first images of all processes; a collective operation."""
        cells = sorted(gather_object(self._cells), key=attrgetter("number"))
        if not is_main or not cells:
            return
        images = [cell.image for cell in cells]
        references = [cell.reference for cell in cells]
        prompts = [cell.prompt for cell in cells]
        if None in references:
            sheet = contact_sheet(images)
        else:
            sheet = contact_sheet(images, prompts, references)
        sheet.save(self.path / "sheet.png")
