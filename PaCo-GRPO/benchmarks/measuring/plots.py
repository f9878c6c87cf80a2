"""Reports as figures, in the style of the run report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from paco_grpo.report.style import FAINT, INK, SERIES, new_figure, save_png, styled

_PHASES = ("encode", "denoising", "decode", "reward_wait", "training")


def plot(report: Mapping[str, Any], path: Path) -> None:
    """The figure of ``report`` as a PNG at ``path``."""
    with styled():
        figure = FIGURES[report["benchmark"]](report)
        save_png(figure, path, dpi=110)


def _epoch(report: Mapping[str, Any]):
    results, pairs = report["results"], report["compared"]
    height = 1.6 + 0.34 * max(len(results), len(pairs))
    figure = new_figure(9.5 if pairs else 5.5, height)
    axes = figure.subplots(1, 2 if pairs else 1, squeeze=False)[0]
    labels, left = [_broken(each["label"]) for each in results], [0.0] * len(results)
    for number, phase in enumerate(_PHASES):
        widths = [max(0.0, each["detailed_seconds"].get(phase) or 0.0) for each in results]
        axes[0].barh(labels, widths, left=left, color=SERIES[number], label=phase.replace("_", " "), height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes[0].set(xlabel="seconds of an epoch", title="Phases")
    axes[0].invert_yaxis()
    axes[0].grid(axis="x"), axes[0].grid(visible=False, axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=5, loc="outside lower left")
    if pairs:
        _ratios(axes[1], pairs)
    return figure


def _broken(label: str) -> str:
    """``label`` on several lines where it names several options."""
    return label.replace("+", "+\n").replace(",", ",\n").replace(" ", "\n" if "=" in label else " ")


def _ratios(axis, pairs: Sequence[Mapping[str, Any]]) -> None:
    for number, each in enumerate(pairs):
        ratio = each["ratio"]["epoch"]
        axis.plot(ratio["raw"], [number] * len(ratio["raw"]), "o", color=FAINT, markersize=3)
        axis.plot([ratio["low"], ratio["high"]], [number, number], color=SERIES[0])
        axis.plot(ratio["median"], number, "o", color=SERIES[0])
    axis.axvline(1.0, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(pairs)), [_broken(each["setting"]) for each in pairs])
    axis.set_ylim(len(pairs) - 0.5, -0.5)
    axis.set(xlabel="seconds of an epoch, ratio to the base", title="Compared: left is faster")
    axis.grid(axis="x"), axis.grid(visible=False, axis="y")


def _resolution_sweep(report: Mapping[str, Any]):
    measured, counted = report["measured"], report["counted"]
    figure = new_figure(9.5, 3.3)
    left, right = figure.subplots(1, 2)
    for number, phase in enumerate(("sampling", "training")):
        if measured:
            sides = [row["resolution"] for row in measured]
            took = [row[f"{phase}_seconds"] for row in measured]
            left.plot(sides, [each["median"] for each in took], "o-", color=SERIES[number], label=f"{phase}, measured")
            left.fill_between(
                sides, [t["low"] for t in took], [t["high"] for t in took], color=SERIES[number], alpha=0.2, linewidth=0
            )
        for line, preset in enumerate(dict.fromkeys(row["preset"] for row in counted)):
            longest = max(row["text_tokens"] for row in counted if row["preset"] == preset)
            rows = [row for row in counted if row["preset"] == preset and row["text_tokens"] == longest]
            sides = [row["resolution"] for row in rows]
            right.plot(
                sides, [row[phase] / 1e12 for row in rows], ["o-", "s--", "^:"][line % 3], color=SERIES[number],
                label=f"{phase}, {preset}",
            )  # fmt: skip
    title = report["settings"]["preset"] if measured else "not measured"
    left.set(xlabel="pixels a side", ylabel="seconds an image", title=f"Measured ({title})")
    right.set(xlabel="pixels a side", ylabel="TFLOP an image", title="Counted, not timed")
    for axis, there in ((left, measured), (right, counted)):
        if there:
            axis.set(yscale="log")
            axis.legend(fontsize=8)
    return figure


def _scaling(report: Mapping[str, Any]):
    figure = new_figure(5.5, 3.0)
    axis = figure.subplots()
    rows = report["rows"]
    counts = [row["processes"] for row in rows]
    axis.plot(counts, [count / counts[0] for count in counts], "--", color=FAINT, label="ideal")
    speed = [row["speedup"] for row in rows]
    axis.errorbar(
        counts, [s["median"] for s in speed], fmt="o-", color=SERIES[0], label="measured",
        yerr=[[s["median"] - s["low"] for s in speed], [s["high"] - s["median"] for s in speed]],
    )  # fmt: skip
    axis.set(xlabel="processes", ylabel="speed-up", title="The same epoch on more processes", ylim=(0, None))
    axis.set_xticks(counts)
    axis.legend()
    return figure


def _environment(report: Mapping[str, Any]):
    rows = report["rows"]
    figure = new_figure(8.0, 1.4 + 0.34 * len(rows))
    _ratios(figure.subplots(), [{"setting": row["setting"], "ratio": row["ratio"]} for row in rows])
    return figure


def _effects(report: Mapping[str, Any]):
    rows = report["rows"]
    figure = new_figure(8.5, 1.4 + 0.34 * len(rows))
    times, pixels = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    times.plot([row["time_ratio"] for row in rows], places, "o", color=SERIES[0])
    times.hlines(places, [r["time_ratio_min"] for r in rows], [r["time_ratio_max"] for r in rows], color=SERIES[0])
    times.axvline(1.0, color=INK, linewidth=0.8)
    times.set(xlabel="time of a batch, ratio to plain", title="Left is faster")
    pixels.barh(places, [row["pixel_rms"] for row in rows], color=SERIES[1], height=0.6)
    pixels.set(xlabel="root mean square of pixels (of 0 to 1)", title="Change of the images")
    times.set_yticks(places, [_broken(row["setting"]) for row in rows])
    times.set_ylim(len(rows) - 0.5, -0.5)
    for axis in (times, pixels):
        axis.grid(axis="x"), axis.grid(visible=False, axis="y")
    return figure


def _judge_load(report: Mapping[str, Any]):
    figure = new_figure(9.0, 3.3)
    left, right = figure.subplots(1, 2)
    for color, name in zip(SERIES, dict.fromkeys(row["target"] for row in report["targets"]), strict=False):
        rows = [row for row in report["targets"] if row["target"] == name and row["p50_ms"] is not None]
        levels = [row["concurrency"] for row in rows]
        left.plot(levels, [row["pairs_per_second"] for row in rows], "o-", color=color, label=name)
        median, most = ([row[f"p{p}_ms"] for row in rows] for p in (50, 90))
        right.plot(levels, median, "o-", color=color, label=name)
        right.fill_between(levels, median, most, color=color, alpha=0.15, linewidth=0)
    left.set(ylabel="pairs a second", ylim=(0, None), title="Throughput")
    right.set(ylabel="ms: median, shaded to p90", yscale="log", title="Latency")
    levels = sorted({row["concurrency"] for row in report["targets"]})
    for axis in (left, right):
        axis.set(xlabel="questions in flight", xscale="log")
        axis.set_xticks(levels, [str(level) for level in levels])
        axis.xaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter(ScalarFormatter())
    right.yaxis.set_minor_locator(NullLocator())
    left.legend(fontsize=8)
    return figure


FIGURES = {
    "judge_load": _judge_load,
    "effects": _effects,
    "epoch": _epoch,
    "resolution_sweep": _resolution_sweep,
    "scaling": _scaling,
    "environment": _environment,
}
