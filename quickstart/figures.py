"""Draws pictures of assets/ again, from results.csv: ``figures.py claims consistency_and_variety``.

The first is in docs/method.md, the second in README.md. Both show one judge: the frozen one, once
it has all their runs, or else the first in results.csv. The second also needs out/study, where
``study.py rewards`` leaves the images of its runs. (pairing.png: figures.py at e793f4b1, with the
title "Cut into panels".)
"""

import argparse
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import study
import study_tables
from paco_judge.files import read_json_lines
from paco_judge.images import load_image

ASSETS = study_tables.HERE.parent / "assets"
GRAY = "#6b7280"
RED = "#d1242f"
BLUE = "#1f5fbf"
ORANGE = "#c2571a"
SHOWN_PROMPT = "a striped square."
SHOWN_SEED = 11
SHOWN_IMAGES = 6
# Run -> label, color, and place of the label in points to the right and up
Groups = Mapping[str, tuple[str, str, int, int]]
REWARDS: Groups = {
    "base": ("base model", GRAY, -66, -4),
    "consistency_nft": ("consistency alone", RED, 8, 6),
    "variety_nft": ("consistency × variety", BLUE, -128, -14),
}
RESOLUTIONS: Groups = {
    "awm": ("trained at 64 px", BLUE, 8, -18),
    "128px": ("trained at 128 px", ORANGE, 30, -36),
}
AGGREGATIONS: Groups = {
    "product": ("product", "#1a7f37", 14, 8),
    "advantage_sum": ("sum of advantages", BLUE, 14, 8),
    "log_tame_always": ("log of both rewards", "#7d3fb0", 14, 8),
    "log_tame": ("log-tame", ORANGE, 14, 8),
    "sum": ("weighted sum", RED, 14, 8),
}


def plot(axes: Axes, rows: pd.DataFrame, groups: Groups, x: str, y: str) -> None:
    """Every seed of each group faintly, and the mean of its seeds with standard errors.

    Groups with several evaluations (``epochs``) become curves.
    """
    for run, (label, color, *place) in groups.items():
        points = rows.loc[rows["run"] == run, ["seed", "epochs", x, y]].fillna({"epochs": 0})
        for _, seed in points.groupby("seed"):
            axes.plot(seed[x], seed[y], ".-", color=color, alpha=0.3)
        by_epoch = points.groupby("epochs")[[x, y]]
        mean = by_epoch.mean()
        error = by_epoch.sem().fillna(0)
        axes.errorbar(
            mean[x], mean[y], error[y], error[x], fmt="o-", color=color, capsize=3, markersize=8
        )
        anchor = mean.iloc[:2].iloc[-1]
        axes.annotate(label, anchor, place, textcoords="offset points", color=color)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)


def draw_claims(results: pd.DataFrame) -> Figure:
    """Two panels: resolutions of training, and aggregations of a loud and a quiet reward."""
    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = study_tables.compared_rows(results, "resolution")
    judges = sizes["judge"].unique()
    frozen = study_tables.FROZEN_JUDGE
    shown = sizes[sizes["judge"] == (frozen if frozen in judges else judges[0])]
    plot(left, shown, RESOLUTIONS, "teraflops", "consistency_after")
    left.set_title("Small images learn more per FLOP", loc="left", fontweight="bold")
    left.set(
        xlabel="TFLOPs of the transformer in training",
        ylabel="consistency at 128 px, full prompts",
        ylim=(0.3, 1),
    )

    both = results[results["study"] == "aggregation"]
    plot(right, study_tables.trained(both), AGGREGATIONS, "alignment_after", "darkness_after")
    before = both.loc[both["epochs"] == 0, ["alignment_after", "darkness_after"]].mean()
    right.plot(*before, "x", color=GRAY, markersize=9)
    right.annotate("before RL", before, (8, -3), textcoords="offset points", color=GRAY)
    right.set_title("A product keeps most of the quieter reward", loc="left", fontweight="bold")
    right.set(
        xlabel="quieter reward: panels show what is named", ylabel="louder reward: dark pixels, %"
    )
    return figure


def draw_front_page(results: pd.DataFrame) -> Figure:
    """Images of one open prompt by three generators, and agreement against diversity."""
    figure = Figure(figsize=(14.4, 4.6), dpi=100, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[2, 1])
    left.suptitle("a striped square: the color is left open")
    grid = left.subplots(len(REWARDS), SHOWN_IMAGES, subplot_kw={"xticks": [], "yticks": []})
    runs = study_tables.front_page_rows(results)
    runs = runs[runs["judge"] == runs["judge"].iloc[0]]
    for cells, (run, (label, *_)) in zip(grid, REWARDS.items(), strict=True):
        cells[0].set_ylabel(label.replace(" ", "\n", 1), rotation=0, ha="right", va="center")
        (shown,) = runs[(runs["run"] == run) & (runs["seed"] == SHOWN_SEED)].to_dict("records")
        *_, evaluation = sorted((study.folder_of(shown) / "agreement").glob("epoch_*"))
        rows = read_json_lines(evaluation / "eval_data.jsonl")
        files = [evaluation / row["file"] for row in rows if SHOWN_PROMPT in row["prompt"]]
        for axes, file in zip(cells, files):  # the first ones
            axes.imshow(load_image(file))
    axes = right.subplots()
    plot(axes, runs, REWARDS, "diversity", "oracle_w")
    axes.set(
        xlabel="diversity between images of a prompt, 1 − b",
        ylabel="agreement within an image, w",
    )
    return figure


PICTURES = {"claims": draw_claims, "consistency_and_variety": draw_front_page}


def main() -> None:
    """Draw the named pictures of assets/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="+", choices=PICTURES)
    for name in parser.parse_args().pictures:
        PICTURES[name](study_tables.read_results()).savefig(ASSETS / f"{name}.png")


if __name__ == "__main__":
    main()
