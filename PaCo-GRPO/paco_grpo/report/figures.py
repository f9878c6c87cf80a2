"""The figures of a report; each takes numbers and returns a matplotlib figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paco_grpo.report.data import Curve, Picture, Run, open_picture
from paco_grpo.report.style import FAINT, GRID, INK, SERIES, new_figure, styled
from paco_judge.grid import PromptLayoutError, split_prompt

LABELS = {
    "consistency_score": "judge's consistency score",
    "consistency_for_editing": "judge's editing score",
    "oracle_consistency": "oracle: consistency",
    "oracle_alignment": "oracle: panels show what is named",
    "oracle_view": "oracle: panels in the view asked for",
    "oracle_valid": "oracle: valid panels",
    "oracle_distinct": "oracle: panels differ",
    "oracle_edit": "oracle: edit",
    "oracle_followed": "oracle: instruction followed",
    "oracle_kept": "oracle: the rest is kept",
}
SHORT = {"consistency_score": "judge", "consistency_for_editing": "judge", "oracle_consistency": "oracle",
         "oracle_edit": "edit", "oracle_followed": "followed", "oracle_kept": "kept"}  # fmt: skip
# The oracle's other measures of the images, in a separate plot.
SIDE = ("oracle_alignment", "oracle_view", "oracle_valid", "oracle_distinct")
DIAGNOSTICS = {"grad_norm": "gradient norm", "ratio_mean": "mean ratio", "clip_share": "clipped samples",
               "zero_std_share": "groups without spread", "velocity_change": "distance to the base",
               "pixel_std_vs_first": "contrast / first", "pixel_detail_vs_first": "detail / first",
               "distinctness_vs_first": "distinctness / first"}  # fmt: skip


def label(name: str) -> str:
    """A metric's name in words."""
    return LABELS.get(name, name.replace("_", " "))


def short_label(name: str) -> str:
    """A metric's name below a picture."""
    return SHORT.get(name, label(name))


def _plot(axes, curves: Iterable[tuple[str, Curve]], colors: Mapping[str, str], title: str, columns: int = 1) -> None:
    """Curves over epochs; bands are one standard error."""
    for name, curve in curves:
        points = {"marker": "o", "markersize": 3.5} if len(curve.epoch) <= 12 else {}
        axes.plot(curve.epoch, curve.value, color=colors[name], label=label(name), **points)
        if curve.error is not None:
            low = [v - e for v, e in zip(curve.value, curve.error, strict=True)]
            high = [v + e for v, e in zip(curve.value, curve.error, strict=True)]
            axes.fill_between(curve.epoch, low, high, color=colors[name], alpha=0.18, linewidth=0)
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, -0.16), ncols=columns, fontsize=8.5, handlelength=1.6, borderaxespad=0
        )


def reward_curves(run: Run) -> Figure:
    """Rewards by epoch, training samples on the left and evaluations on the right."""
    train, test = (f", {side} px" if side else "" for side in run.resolutions)
    values = [v for group in (run.train, run.test) for curve in group.values() for v in curve.value]
    same_scale = bool(values) and min(values) >= 0 and max(values) <= 1
    main = [(name, curve) for name, curve in run.test.items() if name not in SIDE]
    names = dict.fromkeys([*run.train, *dict(main)])
    colors = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    with styled():
        figure = new_figure(8.4, 3.7)
        left, right = figure.subplots(1, 2, sharey=same_scale)
        _plot(left, run.train.items(), colors, f"Training samples{train}")
        _plot(right, main, colors, f"Evaluation{test}")
        right.tick_params(labelleft=True)
        return figure


def side_curves(run: Run) -> Figure | None:
    """The oracle's other measures at test resolution; None if there are none."""
    side = [(name, run.test[name]) for name in SIDE if name in run.test]
    if not side:
        return None
    colors = {name: SERIES[(i + 2) % len(SERIES)] for i, (name, _) in enumerate(side)}
    with styled():
        figure = new_figure(8.4, 3.3)
        axes = figure.subplots()
        resolution = f", {run.resolutions[1]} px" if run.resolutions[1] else ""
        _plot(axes, side, colors, f"Other measures of the images{resolution}", columns=2)
        axes.set_ylim(0, 1.03)
        return figure


def judge_bars(before: Mapping[str, Any], after: Mapping[str, Any]) -> Figure:
    """Accuracy and AUC of the judge, before and after training, on held-out pairs; error bars are one standard error."""
    names = [name for name in ("accuracy", "auc") if before.get(name) is not None and after.get(name) is not None]
    with styled():
        figure = new_figure(4.6, 2.5)
        axes = figure.subplots()
        for row, name in enumerate(names):
            for shift, report, color in ((0.19, before, FAINT), (-0.19, after, SERIES[0])):
                value, n = report[name], report.get("n")
                error = math.sqrt(value * (1 - value) / n) if name == "accuracy" and n else None
                axes.barh(
                    -row + shift, value, height=0.34, color=color, xerr=error, error_kw={"ecolor": INK, "elinewidth": 1}
                )
                axes.text(value + 0.025, -row + shift, f"{value:.3f}", va="center", fontsize=8.5)
        axes.set_yticks([-row for row in range(len(names))], [{"accuracy": "accuracy", "auc": "AUC"}[n] for n in names])
        axes.set_xlim(0, 1.16)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_title("Judge: base (gray) and trained")
        return figure


def stage_bars(seconds: Mapping[str, float], title: str) -> Figure:
    """Time of each stage."""
    total = sum(seconds.values()) or 1.0
    with styled():
        figure = new_figure(4.6, 0.7 + 0.34 * max(len(seconds), 2))
        axes = figure.subplots()
        for row, (name, value) in enumerate(seconds.items()):
            axes.barh(-row, value, height=0.6, color=SERIES[0])
            axes.text(value + total * 0.01, -row, _time(value), va="center", fontsize=8.5)
        axes.set_yticks([-row for row in range(len(seconds))], list(seconds))
        axes.set_xlim(0, max(seconds.values()) * 1.22)
        axes.set_xticks([])
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(f"{title} ({_time(total)})")
        return figure


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def diagnostic_curves(run: Run) -> Figure | None:
    """Small plots of what shows a collapse early: updates above, samples and distance to the base model below."""
    names: Sequence[str] = [name for name in DIAGNOSTICS if name in run.diagnostics]
    if not names:
        return None
    rows = -(-len(names) // 4)
    with styled():
        figure = new_figure(8.4, 2.1 * rows)
        grid = figure.subplots(rows, -(-len(names) // rows), squeeze=False).flat
        for axes in grid[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(grid, names, strict=False):
            curve = run.diagnostics[name]
            axes.plot(curve.epoch, curve.value, color=SERIES[0], linewidth=1.3)
            axes.set_title(DIAGNOSTICS[name], fontsize=9, fontweight="normal")
            axes.ticklabel_format(axis="y", useOffset=False)
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            if name.endswith("share"):
                axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
                axes.set_ylim(0, max(0.05, 1.1 * max(curve.value)))
            if name == "ratio_mean" and max(abs(v - 1) for v in curve.value) < 0.01:
                axes.set_ylim(0.99, 1.01)
            axes.set_xlabel("epoch")
        return figure


def _theme(prompt: str) -> str:
    """What a grid prompt says before its panels; any other prompt as it is."""
    try:
        return split_prompt(prompt).theme
    except PromptLayoutError:
        return prompt


def before_after(pairs: Sequence[tuple[Picture, Picture]], names: Sequence[str], columns: int = 4) -> Figure:
    """Pictures of pairs in rows of ``columns`` (edits: one less), the scores ``names`` below each.

    Before on the left, after on the right, the theme above; for edits the reference first, and the instruction above.
    """
    edits = any(before.reference for before, _ in pairs)
    width, columns = 2 + edits, min(columns - edits, len(pairs))
    rows = -(-len(pairs) // columns)
    with styled():
        figure = new_figure(1.3 * width * columns, (1.9 + 0.15 * len(names)) * rows)
        places = figure.subfigures(rows, columns, squeeze=False).flat
        for place, (before, after) in zip(places, pairs, strict=False):
            lines = textwrap.wrap(_theme(before.prompt), 20 * width, max_lines=2, placeholder="…")
            place.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=8, fontweight="bold")
            shown = [("before", before.file, before), ("after", after.file, after)]
            if before.reference:
                shown.insert(0, ("reference", before.reference, None))
            for axes, (caption, file, picture) in zip(place.subplots(1, width), shown, strict=False):
                axes.imshow(open_picture(file), interpolation="nearest")
                axes.set_title(caption, fontsize=8, fontweight="normal", pad=4)
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set(visible=True, color=GRID)
                scores = [(short_label(name), picture.rewards.get(name)) for name in names if picture]
                lines = [f"{name} {'–' if score is None else f'{score:.2f}'}" for name, score in scores]
                axes.set_xlabel("\n".join(lines), fontsize=8, loc="left")
        return figure
