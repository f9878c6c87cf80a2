"""The folder of an evaluation: its images and pages of them, and who may continue there."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import gather_object
from PIL import Image, ImageDraw

from paco_grpo.data.sets import fingerprint_sets
from paco_grpo.monitoring.trackers import Tracker
from paco_grpo.options import OPTIONS, ConfigError, RunOptions
from paco_grpo.rewards.registry import Reward
from paco_grpo.types import Item
from paco_judge.files import fingerprint, read_json_lines, write_atomically
from paco_judge.images import read_image

SHEET_CELL = 160  # pixels, longer side of an image in a contact sheet
_LINE = 14  # pixels of a line of text
_LETTER = 6  # pixels of a letter
_GAP = 4  # pixels between pictures
_TRACKED_IMAGES = 8
_SHEET_IMAGES = 36
_REFERENCE_SIDE = 256  # pixels at most of the copies of reference images
# Options that change the images, besides all of ``pretrained`` and ``test``.
_OF_IMAGES = (
    "allow_tf32", "item_size", "max_sequence_length", "mixed_precision", "prompt_fn",
    "sample.guidance_scale", "sample.negative_prompt", "seed", "speed.attention", "speed.compile",
)  # fmt: skip
_BY_CONTENT = ("pretrained.model", "test.reward_fn", "test.reward_fn_kwargs")


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

    def write_sheet(self, is_main: bool) -> None:
        """Write ``sheet.png`` with the first images of all processes; a collective operation."""
        cells = sorted(gather_object(self._cells), key=attrgetter("number"))
        if not is_main or not cells:
            return
        _, images, references, prompts = zip(*cells, strict=True)
        if None in references:
            sheet = contact_sheet(images)
        else:
            sheet = contact_sheet(images, prompts, references)
        sheet.save(self.path / "sheet.png")


def is_complete(
    folder: Path, options: RunOptions, rewards: Mapping[str, Reward], adapter: Path | None
) -> bool:
    """Whether ``folder`` holds all images and scores of this evaluation.

    If not, ``evaluation.json`` records what they depend on, so that only the same evaluation
    continues there. Other rewards score the same images.

    Raises:
        ConfigError: The folder holds images of another evaluation.
    """
    identity = _identity(options, rewards, adapter)
    record = folder / "evaluation.json"
    metrics = folder / "metrics.json"
    if record.exists() or any(folder.glob("[0-9]*.png")):
        earlier = json.loads(record.read_bytes()) if record.exists() else {}
        changed = [name for name in identity if earlier.get(name) != identity[name]]
        of_images = [name for name in changed if name != "rewards"]
        if of_images:
            names = ", ".join(of_images)
            raise ConfigError(
                f"{folder} holds images with another {names}: choose another --output"
            )
        if not changed and metrics.is_file():
            missing_share = json.loads(metrics.read_bytes())["eval/missing_share"]
            return missing_share == 0
    folder.mkdir(parents=True, exist_ok=True)
    metrics.unlink(missing_ok=True)
    write_atomically(record, json.dumps(identity, indent=1))
    return False


def _identity(
    options: RunOptions, rewards: Mapping[str, Reward], adapter: Path | None
) -> dict[str, Any]:
    """Everything that changes images or scores; ``rewards`` alone changes only scores."""
    identity: dict[str, Any] = {
        "model": fingerprint(options.pretrained.model),
        "data set": fingerprint_sets(options),
        "adapter": fingerprint(adapter) if adapter else None,
    }
    for name in OPTIONS:
        of_images = name in _OF_IMAGES or name.startswith(("pretrained.", "test."))
        if of_images and name not in _BY_CONTENT:
            identity[f"config.{name}"] = attrgetter(name)(options)
    identity["rewards"] = {}
    for name, reward in rewards.items():
        identity["rewards"][name] = reward.identity()
    return json.loads(json.dumps(identity, default=str))


# --- what a person looks at -----------------------------------------------------------------------


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
