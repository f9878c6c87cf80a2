"""Draws the pictures of assets/ again.

    figures.py claims        # docs/method.md, from results.csv
    figures.py pairing       # PaCo-Reward/README.md, from the toy world
    figures.py front_page    # README.md, from results.csv and the images of the study "rewards"

``front_page`` needs out/study, where ``study.py rewards`` leaves the images of its runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import study
from paco_judge.images import load_image
from paco_toy.world import VIEWS, Character, read_jsonl, render_panel

ASSETS = study.HERE.parent / "assets"
GRAY = "#6b7280"
RED = "#d1242f"
BLUE = "#1f5fbf"
GREEN = "#1a7f37"
ORANGE = "#c2571a"
PURPLE = "#7d3fb0"
TEXT_SIZE = 10


def clean(axes: Axes, title: str, x: str, y: str) -> None:
    """Name a panel and its axes, and take away what does not carry data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.set_title(title, loc="left", fontsize=TEXT_SIZE + 1, fontweight="bold")
    axes.set_xlabel(x, fontsize=TEXT_SIZE)
    axes.set_ylabel(y, fontsize=TEXT_SIZE)


# --- the two claims -------------------------------------------------------------------------------

COMPARED_RESOLUTIONS = {
    "awm": ("trained at 64 px", BLUE, (8, -18)),
    "128px": ("trained at 128 px", ORANGE, (-66, -34)),
}
COMPARED_AGGREGATIONS = {
    "product": ("product", GREEN),
    "advantage_sum": ("sum of advantages", BLUE),
    "log_tame_always": ("log of both rewards", PURPLE),
    "log_tame": ("log-tame", ORANGE),
    "sum": ("weighted sum", RED),
}


def draw_claims(results: pd.DataFrame) -> Figure:
    """Two panels: resolutions of training, and aggregations of two rewards."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_resolutions(left, results)
    draw_aggregations(right, results)
    return figure


def draw_resolutions(axes: Axes, results: pd.DataFrame) -> None:
    """Consistency against compute, one curve for each resolution of training."""
    curves = results.dropna(subset="teraflops")
    larger = curves[curves["run"] == "128px"]
    curves = curves[curves["judge"].isin(larger["judge"]) & curves["seed"].isin(larger["seed"])]
    for run, (label, color, offset) in COMPARED_RESOLUTIONS.items():
        rows = curves[curves["run"] == run]
        for _, points in rows.groupby("seed"):
            axes.plot(points["teraflops"], points["consistency_after"], color=color, alpha=0.25)
        mean = rows.groupby("epochs")[["teraflops", "consistency_after"]].mean()
        axes.plot(mean["teraflops"], mean["consistency_after"], "o-", color=color, linewidth=2)
        place = mean.iloc[1]
        axes.annotate(
            label, place, offset, textcoords="offset points", color=color, fontsize=TEXT_SIZE
        )
    clean(
        axes,
        "Small images learn more per FLOP",
        "TFLOPs of the transformer in training",
        "consistency at 128 px, full prompts",
    )
    axes.set_ylim(0.3, 1)


def draw_aggregations(axes: Axes, results: pd.DataFrame) -> None:
    """The quieter reward after RL with each aggregation: every seed, and their mean."""
    rows = results[results["study"] == "aggregation"]
    base = rows[rows["epochs"] == 0]
    axes.axvline(base["alignment_after"].mean(), color=GRAY, linestyle=":")
    axes.text(base["alignment_after"].mean() - 0.01, -0.45, "before RL", color=GRAY, ha="right")
    axes.text(1.03, -0.9, "louder reward:\ndark pixels", fontsize=TEXT_SIZE - 1, va="center")
    for place, (run, (_, color)) in enumerate(COMPARED_AGGREGATIONS.items()):
        points = study.trained(rows[rows["run"] == run])
        aligned = points["alignment_after"]
        axes.plot(aligned, [place] * len(aligned), "o", color=color, alpha=0.35, markersize=5)
        axes.plot(aligned.mean(), place, "o", color=color, markersize=10)
        axes.text(1.03, place, f"{points['darkness_after'].mean():.0f} %", color=color, va="center")
    clean(axes, "A product keeps most of the quieter reward", "panels show what is named", "")
    labels = [label for label, _ in COMPARED_AGGREGATIONS.values()]
    axes.set_yticks(range(len(labels)), labels)
    for tick, (_, color) in zip(
        axes.get_yticklabels(), COMPARED_AGGREGATIONS.values(), strict=True
    ):
        tick.set_color(color)
    axes.set_xlim(-0.03, 1)
    axes.set_ylim(len(labels) - 0.5, -0.7)


# --- pairs of sub-figures -------------------------------------------------------------------------

YES = GREEN
NO = ORANGE
PURPLE_STAR = Character("outlined", "purple", "star")
BLUE_STAR = Character("outlined", "blue", "star")
STRIPED_STAR = Character("striped", "purple", "star")
# The panels of two images of the prompt "an outlined purple star", in reading order.
IMAGES = (
    (PURPLE_STAR, PURPLE_STAR, BLUE_STAR, PURPLE_STAR),
    (PURPLE_STAR, STRIPED_STAR, PURPLE_STAR, PURPLE_STAR),
)
PANEL_VIEWS = (1, 3, 5, 0)
# Pairs of (image, panel).
PAIRS = (
    ((0, 0), (1, 0)),
    ((0, 1), (1, 3)),
    ((0, 0), (0, 3)),
    ((0, 2), (1, 2)),
    ((0, 2), (1, 1)),
    ((1, 1), (1, 3)),
)


def draw_pairing() -> Figure:
    """Two images of a prompt, their sub-figures, and pairs with the judge's answer."""
    figure = Figure(figsize=(11, 4.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 11)
    axes.set_ylim(0, 4.2)
    axes.axis("off")
    titles = {
        0.3: "1  Images of one prompt",
        3.1: "2  Cut into sub-figures",
        7.0: "3  Pairs with an answer",
    }
    for x, title in titles.items():
        axes.text(x, 3.9, title, fontsize=12, fontweight="bold")
    for image, bottom in enumerate((2.1, 0.2)):
        add_frame(axes, 0.3, bottom, 1.6, GRAY)
        for panel in range(4):
            row, column = divmod(panel, 2)
            add_panel(axes, image, panel, 0.3 + 0.8 * column, bottom + 0.8 * (1 - row), 0.8)
            add_panel(axes, image, panel, 3.1 + 0.85 * panel, bottom + 0.4, 0.8)
            add_frame(axes, 3.1 + 0.85 * panel, bottom + 0.4, 0.8, GRAY)
        arrow = {"arrowstyle": "->", "color": GRAY, "linewidth": 1.5}
        axes.annotate("", (3.0, bottom + 0.8), (2.0, bottom + 0.8), arrowprops=arrow)
    axes.annotate("", (6.9, 2.0), (6.55, 2.0), arrowprops=arrow)
    for index, pair in enumerate(PAIRS):
        row, column = divmod(index, 2)
        x = 7.0 + 2.05 * column
        bottom = 2.8 - 1.2 * row
        characters = {IMAGES[image][panel] for image, panel in pair}
        answer, color = ("Yes", YES) if len(characters) == 1 else ("No", NO)
        for place, (image, panel) in enumerate(pair):
            add_panel(axes, image, panel, x + 0.75 * place, bottom, 0.7)
            add_frame(axes, x + 0.75 * place, bottom, 0.7, color)
        axes.text(
            x + 1.52,
            bottom + 0.35,
            answer,
            color=color,
            fontsize=12,
            fontweight="bold",
            va="center",
        )
    return figure


def add_panel(axes: Axes, image: int, panel: int, x: float, y: float, side: float) -> None:
    """A sub-figure with its lower left corner at ``x``, ``y``."""
    pixels = render_panel(IMAGES[image][panel], VIEWS[PANEL_VIEWS[panel]], 128)
    axes.imshow(
        pixels, extent=(x, x + side, y, y + side), aspect="auto", interpolation="antialiased"
    )


def add_frame(axes: Axes, x: float, y: float, side: float, color: str) -> None:
    """Draw a square whose lower left corner is at (x, y)."""
    axes.add_patch(Rectangle((x, y), side, side, fill=False, edgecolor=color, linewidth=1.3))


# --- front page -----------------------------------------------------------------------------------

SHOWN_PROMPT = "a striped square."
SHOWN_SEED = 11
SHOWN_IMAGES = 6
# Run -> label of its images; label in the diagram, color and where that stands, in points.
SHOWN_RUNS = {
    "base": "base model",
    "consistency_nft": "consistency\nalone",
    "variety_nft": "consistency\n× variety",
}
COMPARED_REWARDS = {
    "base": ("base model", GRAY, (-66, -4)),
    "consistency_nft": ("consistency alone", RED, (8, 6)),
    "variety_nft": ("consistency × variety", BLUE, (-128, -14)),
}


def draw_front_page(results: pd.DataFrame, runs: Path) -> Figure:
    """Images of one open prompt by three generators, and agreement against diversity."""
    figure = Figure(figsize=(14.4, 4.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
    left.suptitle("a striped square: the color is left open", fontsize=TEXT_SIZE + 1)
    grid = left.subplots(len(SHOWN_RUNS), SHOWN_IMAGES)
    for cells, (run, label) in zip(grid, SHOWN_RUNS.items(), strict=True):
        files = images_of(runs / f"{run}-seed{SHOWN_SEED}" / "agreement")
        cells[0].set_ylabel(label, rotation=0, ha="right", va="center")
        for axes, file in zip(cells, files, strict=True):
            axes.imshow(load_image(file))
            axes.set_xticks([])
            axes.set_yticks([])
    draw_rewards(right.subplots(), results)
    return figure


def images_of(evaluation: Path) -> Sequence[Path]:
    """The first images of the shown prompt."""
    rows = read_jsonl(next(evaluation.rglob("eval_data.jsonl")))
    files = [evaluation / row["file"] for row in rows if SHOWN_PROMPT in row["prompt"]]
    if len(files) < SHOWN_IMAGES:
        raise SystemExit(f"{evaluation} has {len(files)} images of {SHOWN_PROMPT!r}")
    return files[:SHOWN_IMAGES]


def draw_rewards(axes: Axes, results: pd.DataFrame) -> None:
    """Agreement within images against diversity between them: seeds, means, standard errors."""
    rows = study.trained(results)
    judges = rows.loc[rows["run"] == "variety_nft", "judge"]
    rows = rows[rows["judge"].isin(judges)].assign(diversity=1 - rows["oracle_b"])
    for run, (label, color, offset) in COMPARED_REWARDS.items():
        points = rows.loc[rows["run"] == run, ["diversity", "oracle_w"]]
        mean = points.mean()
        error_x, error_y = points.sem()
        axes.plot(*points.to_numpy().T, ".", color=color, alpha=0.35)
        axes.errorbar(*mean, error_y, error_x, fmt="o", color=color, capsize=3, markersize=8)
        axes.annotate(
            label, mean, offset, textcoords="offset points", color=color, fontsize=TEXT_SIZE
        )
    clean(axes, "", "diversity between images of a prompt, 1 − b", "agreement within an image, w")


def main() -> None:
    """Draw the named pictures of assets/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", nargs="+", choices=["claims", "pairing", "front_page"])
    parser.add_argument("--runs", type=Path, default=study.OUT, help="folder of the study's runs")
    parser.add_argument("--output", type=Path, default=ASSETS)
    arguments = parser.parse_args()
    results = study.read_results()
    for picture in arguments.pictures:
        if picture == "claims":
            draw_claims(results).savefig(arguments.output / "claims.png", dpi=130)
        elif picture == "pairing":
            draw_pairing().savefig(arguments.output / "pairing.png", dpi=160)
        else:
            figure = draw_front_page(results, arguments.runs)
            figure.savefig(arguments.output / "consistency_and_variety.png", dpi=100)


if __name__ == "__main__":
    main()
