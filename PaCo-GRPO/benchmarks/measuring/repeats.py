"""Medians and spreads of repeats, and ratios of runs that took turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number of ``values``; those that are None are left out."""
    present = [value for value in values if value is not None]
    if not present:
        return {"median": None, "low": None, "high": None, "n": 0}
    low, median, high = np.percentile(present, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high), "n": len(present)}


def ratios(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Of what was measured in the same round, with every one of them; a round where a side is missing is left out."""
    raw = [a / b for a, b in zip(values, base, strict=True) if a and b]
    return summary(raw) | {"raw": raw}
