"""A picture file of image pairs: before on the left, after on the right, scores below; for edits the reference first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from paco_grpo.report.data import Picture
from paco_grpo.report.figures import short_label
from paco_grpo.report.style import FAINT, INK

SIDE = 192
GAP = 10
LINE = 17


def _fitted(file: Path) -> Image.Image:
    image = Image.open(file).convert("RGB")
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _font(size: int, bold: bool = False):
    # Matplotlib brings a real font with it; Pillow's own is a bitmap.
    from matplotlib import font_manager

    wanted = font_manager.FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")
    return ImageFont.truetype(font_manager.findfont(wanted), size)


def _cut(text: str, font, width: int) -> str:
    """``text``, or as much of it as fits into ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def before_after_sheet(pairs: Sequence[tuple[Picture, Picture]], names: Sequence[str], columns: int = 4) -> Image.Image:
    """Pairs in rows of ``columns`` (edits: one less); ``names`` of the scores written under each picture."""
    edits = any(before.reference for before, _ in pairs)
    columns = min(columns - edits, len(pairs))
    rows = -(-len(pairs) // columns)
    head = LINE + 4 if edits else 0  # the instruction
    cell = ((2 + edits) * (SIDE + GAP) + GAP, head + SIDE + LINE * (len(names) + 1) + 2 * GAP)
    sheet = Image.new("RGB", (columns * cell[0] + GAP, rows * cell[1] + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), _font(12)
    for number, pair in enumerate(pairs):
        left, top = number % columns * cell[0] + GAP, number // columns * cell[1] + GAP
        if edits:
            bold = _font(12, bold=True)
            pen.text((left, top), _cut(pair[0].prompt, bold, cell[0] - 2 * GAP), fill=INK, font=bold)
            top += head
        shown = [("before", pair[0].file, pair[0]), ("after", pair[1].file, pair[1])]
        if pair[0].reference:
            shown.insert(0, ("reference", pair[0].reference, None))
        for side, (what, file, picture) in enumerate(shown):
            x = left + side * (SIDE + GAP)
            pen.text((x, top), what, fill=INK, font=font)
            sheet.paste(_fitted(file), (x, top + LINE))
            pen.rectangle((x, top + LINE, x + SIDE - 1, top + LINE + SIDE - 1), outline="#e3e6ea")
            for line, name in enumerate(names if picture else ()):
                value = picture.rewards.get(name)
                words = f"{short_label(name)} {'–' if value is None else f'{value:.2f}'}"
                pen.text((x, top + SIDE + LINE * (line + 1) + 4), words, fill=FAINT if line else INK, font=font)
    return sheet
