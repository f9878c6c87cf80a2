"""The figures of a report; each takes numbers and returns a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paco_grpo.report.data import Curve, Run
from paco_grpo.report.style import FAINT, INK, SERIES, new_figure, styled

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
# What the oracle says of the images beyond consistency goes into a plot of its own.
SIDE = ("oracle_alignment", "oracle_view", "oracle_valid", "oracle_distinct")


def label(name: str) -> str:
    """A metric's name in words."""
    return LABELS.get(name, name.replace("_", " "))


def short_label(name: str) -> str:
    """A metric's name below a picture."""
    return SHORT.get(name, label(name))


def _draw(axes, x: Sequence[float], curve: Curve, colour: str, text: str, *, dashed: bool = False) -> None:
    points = {"marker": "o", "markersize": 3.5} if len(x) <= 12 else {}
    axes.plot(x, curve.value, color=colour, label=text, linestyle="--" if dashed else "-", **points)
    if curve.error is not None:
        low = [v - e for v, e in zip(curve.value, curve.error, strict=True)]
        high = [v + e for v, e in zip(curve.value, curve.error, strict=True)]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _legend(axes, columns: int = 1) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=columns, fontsize=8.5, handlelength=1.6, borderaxespad=0)


def reward_curves(run: Run) -> Figure:
    """Rewards against epochs, training and test resolution beside each other; bands are one standard error."""
    train, test = run.resolutions
    with styled():
        figure = new_figure(8.4, 3.7)
        left, right = figure.subplots(1, 2, sharey=_same_scale(run))
        main = [name for name in run.test if name not in SIDE]
        colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(dict.fromkeys([*run.train, *main]))}
        for name, curve in run.train.items():
            _draw(left, curve.epoch, curve, colours[name], label(name))
        for name in main:
            _draw(right, run.test[name].epoch, run.test[name], colours[name], label(name))
        left.set_title(f"Training samples{f', {train} px' if train else ''}")
        right.set_title(f"Evaluation{f', {test} px' if test else ''}")
        right.tick_params(labelleft=True)
        for axes in (left, right):
            axes.set_xlabel("epoch")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            _legend(axes)
        return figure


def _same_scale(run: Run) -> bool:
    """Whether all rewards live in [0, 1], so that one axis serves both."""
    values = [v for group in (run.train, run.test) for curve in group.values() for v in curve.value]
    return bool(values) and min(values) >= 0 and max(values) <= 1


def side_curves(run: Run) -> Figure | None:
    """What else changed in the images at test resolution; None where there is nothing to say."""
    names = [name for name in SIDE if name in run.test]
    if not names:
        return None
    with styled():
        figure = new_figure(8.4, 3.3)
        axes = figure.subplots()
        for i, name in enumerate(names):
            _draw(axes, run.test[name].epoch, run.test[name], SERIES[(i + 2) % len(SERIES)], label(name))
        axes.set_title(f"The rest of the images{f', {run.resolutions[1]} px' if run.resolutions[1] else ''}")
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _legend(axes, columns=2)
        return figure


def judge_bars(before: Mapping[str, Any], after: Mapping[str, Any]) -> Figure:
    """Accuracy and AUC of the judge, before and after training, on held-out pairs; error bars are one standard error."""
    with styled():
        figure = new_figure(4.6, 2.5)
        axes = figure.subplots()
        names = [name for name in ("accuracy", "auc") if before.get(name) is not None and after.get(name) is not None]
        for row, name in enumerate(names):
            for shift, report, colour in ((0.19, before, FAINT), (-0.19, after, SERIES[0])):
                value, n = report[name], report.get("n")
                error = math.sqrt(value * (1 - value) / n) if name == "accuracy" and n else None
                axes.barh(-row + shift, value, height=0.34, color=colour, xerr=error, error_kw={"ecolor": INK, "elinewidth": 1})
                axes.text(value + 0.025, -row + shift, f"{value:.3f}", va="center", fontsize=8.5)
        axes.set_yticks([-row for row in range(len(names))], [{"accuracy": "accuracy", "auc": "AUC"}[n] for n in names])
        axes.set_xlim(0, 1.16)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        axes.set_title("Judge: base (grey) and trained")
        return figure


def stage_bars(seconds: Mapping[str, float], title: str) -> Figure:
    """Time of each stage."""
    with styled():
        figure = new_figure(4.6, 0.7 + 0.34 * max(len(seconds), 2))
        axes = figure.subplots()
        total = sum(seconds.values()) or 1.0
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
    wanted = {"grad_norm": "gradient norm", "ratio_mean": "mean ratio", "clip_share": "clipped samples",
              "zero_std_share": "groups without spread", "velocity_change": "distance to the base",
              "pixel_std_vs_first": "contrast / first", "pixel_detail_vs_first": "detail / first",
              "distinctness_vs_first": "distinctness / first"}  # fmt: skip
    names = [name for name in wanted if name in run.diagnostics]
    if not names:
        return None
    with styled():
        rows = -(-len(names) // 4)
        figure = new_figure(8.4, 2.1 * rows)
        grid = figure.subplots(rows, -(-len(names) // rows), squeeze=False).flat
        for axes in grid[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(grid, names, strict=False):
            curve = run.diagnostics[name]
            axes.plot(curve.epoch, curve.value, color=SERIES[0], linewidth=1.3)
            axes.set_title(wanted[name], fontsize=9, fontweight="normal")
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
