"""The curves of a report."""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TRAINING = "#e08a1e"  # colors of the curves, and of the legend in the template
EVALUATION = "#2563c9"
LIMIT = "#c62828"
RUNS = (EVALUATION, TRAINING, "#2e8b57", "#8e44ad", "#c2185b", "#607d8b")
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.frameon": False,
    "savefig.transparent": True,  # the page's color is behind it
    "svg.fonttype": "none",  # text stays text, in the browser's font
    "svg.hashsalt": "report",  # the same run gives the same page
}


class Curve(NamedTuple):
    """A curve of a plot: its name, (N, 4) as in ``RunReport``, and its color."""

    name: str
    values: np.ndarray
    color: str
    best: int | None = None  # epoch to mark


def plot(
    curves: Sequence[Curve], limits: Sequence[float] = (), size: tuple[float, float] = (3.4, 2.1)
) -> dict[str, str]:
    """``image``, a URL that holds the curves with ``limits`` as lines, and ``alt``, what they show.

    Bands are a standard error. The best evaluation has a star.
    """
    texts = []
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)
        axes = figure.subplots()
        for curve in curves:
            epochs, values, errors, _ = curve.values.T
            axes.plot(epochs, values, color=curve.color, marker="o", markersize=3)
            band = {"color": curve.color, "alpha": 0.18, "linewidth": 0}
            axes.fill_between(epochs, values - errors, values + errors, **band)
            text = f"{curve.name} {values[0]:.3g} → {values[-1]:.3g}"
            text += f" (epochs {epochs[0]:.0f} to {epochs[-1]:.0f})"
            marked = epochs == curve.best
            if marked.any():
                axes.plot(epochs[marked], values[marked], color=curve.color, marker="*", ms=11)
                text += f", best after epoch {curve.best}: {values[marked][0]:.3g}"
            texts.append(text)
        for limit in limits:
            axes.axhline(limit, color=LIMIT, linestyle="--", linewidth=1)
            texts.append(f"limit {limit:.3g}")
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        return {"image": svg_url(figure), "alt": "; ".join(texts)}


def svg_url(figure: Figure) -> str:
    """The figure as a URL that holds it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
