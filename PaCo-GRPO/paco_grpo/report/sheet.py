"""A picture file of image pairs: before on the left, after on the right, scores below."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from paco_grpo.report.data import Picture
from paco_grpo.report.figures import short_label
from paco_grpo.report.style import FAINT, INK

SIDE = 192
GAP = 10
LINE = 17


def _fitted(picture: Picture) -> Image.Image:
    image = Image.open(picture.file).convert("RGB")
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _font(size: int):
    # Matplotlib brings a real font with it; Pillow's own is a bitmap.
    from matplotlib import font_manager

    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


def before_after_sheet(pairs: Sequence[tuple[Picture, Picture]], names: Sequence[str], columns: int = 4) -> Image.Image:
    """Pairs in rows of ``columns``; ``names`` of the scores written under each picture."""
    columns = min(columns, len(pairs))
    rows = -(-len(pairs) // columns)
    cell = (2 * SIDE + 3 * GAP, SIDE + LINE * (len(names) + 1) + 2 * GAP)
    sheet = Image.new("RGB", (columns * cell[0] + GAP, rows * cell[1] + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), _font(12)
    for number, pair in enumerate(pairs):
        left, top = number % columns * cell[0] + GAP, number // columns * cell[1] + GAP
        for side, (when, picture) in enumerate(zip(("before", "after"), pair, strict=True)):
            x = left + side * (SIDE + GAP)
            pen.text((x, top), when, fill=INK, font=font)
            sheet.paste(_fitted(picture), (x, top + LINE))
            pen.rectangle((x, top + LINE, x + SIDE - 1, top + LINE + SIDE - 1), outline="#e3e6ea")
            for line, name in enumerate(names):
                value = picture.rewards.get(name)
                words = f"{short_label(name)} {'–' if value is None else f'{value:.2f}'}"
                pen.text((x, top + SIDE + LINE * (line + 1) + 4), words, fill=FAINT if line else INK, font=font)
    return sheet
