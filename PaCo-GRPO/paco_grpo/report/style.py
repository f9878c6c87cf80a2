"""How figures look: readable on white paper and in a page with a dark background.

Figures use placeholder colors. A PNG shows them as they are; in an SVG inside the page each becomes a CSS variable, so
that the figures follow the page's light and dark colors.
"""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# placeholder (as used for PNGs) -> CSS variable
INK = "#2b2f36"
FAINT = "#9aa1ab"
GRID = "#e3e6ea"
PAPER = "#ffffff"
SERIES = ("#2f6db5", "#d9622b", "#3c8f5a", "#8a5bb0", "#b08a1e", "#c2477f")
VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", PAPER: "--paper"} | {
    color: f"--series-{i}" for i, color in enumerate(SERIES)
}
RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "paco",
}


def styled() -> AbstractContextManager[None]:
    """Matplotlib's settings of these figures, for the block only."""
    return mpl.rc_context(RC)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches; no global state of pyplot."""
    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Figure, path: Path, dpi: int = 160) -> None:
    """Write a PNG on white."""
    with styled():
        FigureCanvasAgg(figure)
        figure.savefig(path, dpi=dpi, facecolor=PAPER)


def svg(figure: Figure, name: str) -> str:
    """An ``<svg>`` element for a page; its ids begin with ``name``, so that figures do not share ids."""
    with styled(), mpl.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=False, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', rf'\1 role="img" aria-label="{name}"', text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for color, variable in VARIABLES.items():
        text = re.sub(re.escape(color), f"var({variable})", text, flags=re.IGNORECASE)
    prefix = re.sub(r"\W+", "-", name)
    text = re.sub(r'\b(id="|href="#)', rf"\1{prefix}-", text)
    return text.replace("url(#", f"url(#{prefix}-")
