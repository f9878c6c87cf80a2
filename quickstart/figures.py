"""Draws the diagrams in assets/: `.venv/bin/python quickstart/figures.py`. (The curves in assets/ are drawn by study.py.)

    rl_loop.png   one epoch of PaCo-GRPO with PaCo-Reward, and how evaluation differs
    pairing.png   sub-figure pairing: from generated grids to Yes/No pairs
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

from paco_grpo.report.style import FAINT, GRID, INK, SERIES, new_figure, save_png, styled
from paco_judge.grid import pairs, split_image
from paco_toy.world import CHARACTERS, VIEWS, assemble_grid, render_panel, to_uint8

ASSETS = Path(__file__).resolve().parent.parent / "assets"
BLUE, ORANGE, GREEN, PURPLE = SERIES[:4]


def _canvas(width: float, height: float) -> tuple[Figure, object]:
    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def _box(axes, x: float, y: float, width: float, height: float, title: str, text: str, color: str) -> None:
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.09", linewidth=1.4,
                                  edgecolor=color, facecolor=color + "14"))  # fmt: skip
    axes.text(x + width / 2, y + height - 0.2, title, ha="center", va="top", fontsize=9.5, fontweight="bold", color=color)
    axes.text(x + width / 2, y + height - 0.47, text, ha="center", va="top", fontsize=8, color=INK, linespacing=1.45)


def _arrow(axes, start: tuple[float, float], end: tuple[float, float], text: str = "", *, bend: float = 0.0,
           color: str = FAINT, offset: tuple[float, float] = (0, 0.1)) -> None:  # fmt: skip
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, linewidth=1.4, color=color, shrinkA=2, shrinkB=2,
                                   connectionstyle=f"arc3,rad={bend}"))  # fmt: skip
    if text:
        x, y = (start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1]
        axes.text(x, y, text, ha="center", va="bottom", fontsize=7.5, color=FAINT, linespacing=1.3)


def rl_loop() -> Figure:
    """One epoch, left to right, and back."""
    with styled():
        figure, axes = _canvas(10.4, 4.15)
        y, height = 2.35, 1.35
        _box(axes, 0.1, y, 1.75, height, "Prompts", "m items, a grid of\npanels each; k images\nof every item", INK)
        _box(axes, 2.35, y, 2.2, height, "Generator", "FLUX + LoRA, few steps,\nsmall images; noise and\nlog-probability at one step", BLUE)
        _box(axes, 5.15, y, 2.2, height, "PaCo-Reward", "each image cut into\nsub-figures; P(Yes) of every\npair, over HTTP; the mean", ORANGE)
        _box(axes, 7.95, y, 2.3, height, "Advantages", "several rewards in one;\nrelative to the group of the\nsame prompt; missing is missing", PURPLE)
        middle = y + height / 2
        _arrow(axes, (1.85, middle), (2.35, middle))
        _arrow(axes, (4.55, middle), (5.15, middle), "images")
        _arrow(axes, (7.35, middle), (7.95, middle), "scores")
        _box(axes, 4.4, 0.15, 3.6, 1.25, "Update", "clipped policy loss at the noisy steps only;\nAdamW on the LoRA weights, with an EMA", BLUE)
        _arrow(axes, (9.1, y), (8.0, 0.78), "advantages", bend=-0.25, offset=(0.85, -0.3))
        _arrow(axes, (4.4, 0.78), (3.3, y), "new weights", bend=-0.25, offset=(-0.5, -0.38))
        _box(axes, 0.1, 0.15, 2.45, 1.25, "Evaluation", "EMA weights, large images,\nheld-out prompts, plain steps;\nan oracle that nothing trains on", GREEN)
        _arrow(axes, (2.75, y), (1.55, 1.4), color=GREEN)
        axes.text(0.1, 4.02, "Train small, use large: one epoch of PaCo-GRPO", fontsize=11, fontweight="bold", va="top")
        return figure


def _grids(seed: int) -> tuple[list[np.ndarray], list[list[int]]]:
    """Two generations of one prompt, with departures: grids, and the character in each panel."""
    rng = np.random.default_rng(seed)
    views = [VIEWS[v] for v in rng.permutation(len(VIEWS))[:4]]
    star, blue, striped = (next(i for i, c in enumerate(CHARACTERS) if str(c) == name)
                           for name in ("outlined purple star", "outlined blue star", "striped purple star"))  # fmt: skip
    shown = [[star, star, blue, star], [star, striped, star, star]]
    return [assemble_grid([render_panel(CHARACTERS[c], v, 96) for c, v in zip(row, views, strict=True)]) for row in shown], shown


def _picture(axes, image: np.ndarray, x: float, y: float, side: float, edge: str = GRID, linewidth: float = 1.0) -> None:
    axes.imshow(image, extent=(x, x + side, y, y + side), interpolation="nearest", zorder=2)
    axes.add_patch(FancyBboxPatch((x, y), side, side, boxstyle="square,pad=0", fill=False, edgecolor=edge, linewidth=linewidth, zorder=3))


def pairing() -> Figure:
    """Grids -> sub-figures -> pairs with answers."""
    with styled():
        figure, axes = _canvas(10.4, 3.9)
        grids, shown = _grids(2)
        heads = ((0.1, "1  One prompt, several generations"), (3.55, "2  Cut into sub-figures"), (6.45, "3  Pairs across and within, with an answer"))
        for x, text in heads:
            axes.text(x, 3.78, text, fontsize=9.5, fontweight="bold", va="top")
        cells, characters = [], []
        for row, (grid, named) in enumerate(zip(grids, shown, strict=True)):
            y = 1.85 - 1.75 * row
            _picture(axes, grid, 0.1, y, 1.55)
            panels = split_image(Image.fromarray(to_uint8(grid)), 2, 2)
            for i, panel in enumerate(panels):
                _picture(axes, np.asarray(panel), 3.55 + 0.62 * i, y + 0.5, 0.55)
            cells += [np.asarray(panel) for panel in panels]
            characters += named
            _arrow(axes, (1.75, y + 0.78), (3.45, y + 0.78), "equal cells,\nrow by row")
        chosen = [p for p in pairs(8) if p in ((0, 1), (0, 7), (2, 3), (5, 6), (1, 4), (2, 5))]
        for k, (i, j) in enumerate(chosen):
            x, y = 6.5 + 1.95 * (k % 2), 2.55 - 1.1 * (k // 2)
            same = characters[i] == characters[j]
            for shift, index in ((0, i), (0.62, j)):
                _picture(axes, cells[index], x + shift, y, 0.57, edge=GREEN if same else ORANGE, linewidth=1.3)
            axes.text(x + 1.27, y + 0.28, "Yes" if same else "No", va="center", fontsize=10, fontweight="bold", color=GREEN if same else ORANGE)
        _arrow(axes, (6.1, 1.8), (6.45, 1.8))
        axes.set_xlim(0, 10.4)
        axes.set_ylim(0, 3.9)
        axes.set_aspect("equal")
        return figure


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for draw in (rl_loop, pairing):
        save_png(draw(), out / f"{draw.__name__}.png", dpi=170)
        print(out / f"{draw.__name__}.png")


if __name__ == "__main__":
    main()
