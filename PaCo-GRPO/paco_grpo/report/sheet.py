"""A picture file of image pairs: before on the left, after on the right, scores below; for edits the reference first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from paco_grpo.report.data import Picture
from paco_grpo.report.figures import short_label
from paco_grpo.report.style import FAINT, GRID, INK

SIDE = 192
GAP = 10
LINE = 17


def before_after_sheet(pairs: Sequence[tuple[Picture, Picture]], names: Sequence[str], columns: int = 4) -> Image.Image:
    """Pairs in rows of ``columns`` (edits: one less); ``names`` of the scores written under each picture."""
    edits = any(before.reference for before, _ in pairs)
    columns = min(columns - edits, len(pairs))
    rows = -(-len(pairs) // columns)
    head = LINE + 4 if edits else 0  # the instruction
    cell = ((2 + edits) * (SIDE + GAP) + GAP, head + SIDE + LINE * (len(names) + 1) + 2 * GAP)
    sheet = Image.new("RGB", (columns * cell[0] + GAP, rows * cell[1] + GAP), "white")
    pen, font, bold = ImageDraw.Draw(sheet), _font("normal"), _font("bold")
    for number, (before, after) in enumerate(pairs):
        left, top = number % columns * cell[0] + GAP, number // columns * cell[1] + GAP
        if edits:
            text, width = before.prompt, cell[0] - 2 * GAP
            while text and bold.getlength(text + "…" * (text != before.prompt)) > width:
                text = text[:-1]
            pen.text((left, top), text + "…" * (text != before.prompt), fill=INK, font=bold)
            top += head
        shown = [("before", before.file, before), ("after", after.file, after)]
        if before.reference:
            shown.insert(0, ("reference", before.reference, None))
        for position, (caption, file, picture) in enumerate(shown):
            x = left + position * (SIDE + GAP)
            pen.text((x, top), caption, fill=INK, font=font)
            sheet.paste(_fitted(file), (x, top + LINE))
            pen.rectangle((x, top + LINE, x + SIDE - 1, top + LINE + SIDE - 1), outline=GRID)
            for line, name in enumerate(names if picture else ()):
                value = picture.rewards.get(name)
                score = f"{short_label(name)} {'–' if value is None else f'{value:.2f}'}"
                pen.text((x, top + SIDE + LINE * (line + 1) + 4), score, fill=FAINT if line else INK, font=font)
    return sheet


def _fitted(file: Path) -> Image.Image:
    image = Image.open(file).convert("RGB")
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _font(weight: str) -> ImageFont.FreeTypeFont:
    # Matplotlib ships a scalable font; Pillow's default is a bitmap.
    wanted = font_manager.FontProperties(family="DejaVu Sans", weight=weight)
    return ImageFont.truetype(font_manager.findfont(wanted), 12)
