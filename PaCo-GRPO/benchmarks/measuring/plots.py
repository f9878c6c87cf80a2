"""Figures of reports, in the style of the run report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from paco_grpo.report.style import FAINT, INK, SERIES, new_figure, save_png, styled

_PHASES = ("encode", "denoising", "decode", "reward_wait", "training")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    with styled():
        save_png(figure, path, dpi=110)


def sweep(report: Mapping[str, Any]) -> Figure:
    """Seconds by phase, ratios to the base, and the change of the images where it was measured."""
    results = report["results"]
    places, labels = range(len(results)), [each["label"] for each in results]
    labels = [label.replace(" ", "\n") if "=" in label else label for label in labels]  # one assignment a line
    images = "ratio_deviation" in results[0]
    with styled():
        figure = new_figure(12.0 if images else 9.5, 1.6 + 0.4 * len(results))
        phases, ratios, *pixels = figure.subplots(1, 3 if images else 2, sharey=True)
        left = [0.0] * len(results)
        for color, phase in zip(SERIES, _PHASES, strict=False):
            widths = [each["seconds"][phase]["median"] for each in results]
            phases.barh(places, widths, left=left, color=color, label=phase.replace("_", " "), height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        phases.set(xlabel="seconds of an epoch", title="Phases")
        figure.legend(*phases.get_legend_handles_labels(), fontsize=8, ncols=5, loc="outside lower left")
        for place, each in enumerate(results):
            ratio = each["ratio"]["epoch"]
            ratios.plot(ratio["raw"], [place] * len(ratio["raw"]), "o", color=FAINT, markersize=3)
            ratios.plot([ratio["low"], ratio["high"]], [place, place], color=SERIES[0])
            ratios.plot(ratio["median"], place, "o", color=SERIES[0])
        ratios.axvline(1.0, color=INK, linewidth=0.8)
        ratios.set(xlabel=f"ratio to {report['settings']['base']}", title="Epoch: left is faster")
        for axis in pixels:
            axis.barh(places, [each.get("pixel_rms", 0.0) for each in results], color=SERIES[1], height=0.6)
            axis.set(xlabel="root mean square of pixels (0 to 1)", title="Change of the images")
        phases.set_yticks(places, labels)
        phases.set_ylim(len(results) - 0.5, -0.5)
        for axis in (phases, ratios, *pixels):
            axis.grid(axis="x")
            axis.grid(visible=False, axis="y")
    return figure


def judge_load(report: Mapping[str, Any]) -> Figure:
    """Throughput and latency by the number of questions in flight."""
    levels = sorted({row["concurrency"] for row in report["targets"]})
    with styled():
        figure = new_figure(9.0, 3.3)
        left, right = figure.subplots(1, 2)
        for color, name in zip(SERIES, dict.fromkeys(row["target"] for row in report["targets"]), strict=False):
            rows = [row for row in report["targets"] if row["target"] == name and row["p50_ms"] is not None]
            asked = [row["concurrency"] for row in rows]
            left.plot(asked, [row["pairs_per_second"] for row in rows], "o-", color=color, label=name)
            median, most = ([row[f"p{p}_ms"] for row in rows] for p in (50, 90))
            right.plot(asked, median, "o-", color=color)
            right.fill_between(asked, median, most, color=color, alpha=0.15, linewidth=0)
        left.set(ylabel="pairs per second", ylim=(0, None), title="Throughput")
        right.set(ylabel="ms: median, shaded to p90", yscale="log", title="Latency")
        for axis in (left, right):
            axis.set(xlabel="questions in flight", xscale="log")
            axis.set_xticks(levels, [str(level) for level in levels])
            axis.xaxis.set_minor_locator(NullLocator())
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(ScalarFormatter())
        right.yaxis.set_minor_locator(NullLocator())
        left.legend(fontsize=8)
    return figure
