"""Reports of benchmarks: where and how something was measured, medians and ratios, Markdown tables, JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 2
NOTHING = "–"
_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "numpy", "triton", "bitsandbytes", "deepspeed")


def machine() -> dict[str, Any]:
    """Hardware and load of this machine; memory in GiB."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.is_file() else "", re.MULTILINE)
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "processor": named[1] if named else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": [round(value, 2) for value in os.getloadavg()],
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)} for gpu in gpus],
    }


def versions() -> dict[str, str]:
    """Versions of Python, CUDA and the installed packages that affect speed."""
    import torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | ({"cuda": torch.version.cuda} if torch.cuda.is_available() else {})


def commit() -> dict[str, Any]:
    """The repository's commit and the number of changed files; empty outside of git."""
    git = ["git", "-C", str(_ROOT)]
    try:
        head, changed = (
            subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": head.strip(), "changed_files": len(changed.splitlines())}


def header(benchmark: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The common part of every report."""
    return {
        "benchmark": benchmark,
        "format": FORMAT,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(),
        "versions": versions(),
        "git": commit(),
        "settings": dict(settings),
    }


def write(path: Path, made: Mapping[str, Any], text: str = "") -> None:
    """Write the report as JSON and ``text`` next to it as Markdown; an interrupted run leaves no half-written file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if text:
        path.with_suffix(".md").write_text(f"`{made['command']}`\n\n{text}")
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(made, indent=1, default=str) + "\n")
    partial.replace(path)


# --- repeated measurements --------------------------------------------------------------------------------------------


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """Median, quartiles and number of the ``values`` that are not None."""
    present = [value for value in values if value is not None]
    if not present:
        return {"median": None, "low": None, "high": None, "n": 0}
    low, median, high = np.percentile(present, [25, 50, 75])
    return {"median": float(median), "low": float(low), "high": float(high), "n": len(present)}


def ratios(values: Sequence[float | None], base: Sequence[float | None]) -> dict[str, Any]:
    """Summary of ``values[i] / base[i]``, measured in the same round, with the ratios as ``raw``."""
    raw = [a / b for a, b in zip(values, base, strict=True) if a and b]
    return summary(raw) | {"raw": raw}


# --- tables -----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def number(value: float | None, form: str = ".3g") -> str:
    """``value`` in ``form``, large ones without an exponent; a dash for None."""
    if value is None:
        return NOTHING
    text = format(value, form)
    return f"{value:.0f}" if "e+" in text else text


def spread(of: Mapping[str, Any] | None, form: str = ".3g") -> str:
    """Median and quartiles; less than a millisecond of waiting is 0."""
    if not of or of["median"] is None:
        return NOTHING
    if 0 <= of["low"] <= of["high"] < 1e-3:
        return "0"
    return f"{number(of['median'], form)} ({number(of['low'], form)}–{number(of['high'], form)})"


def share(value: float | None) -> str:
    """A share as a percentage."""
    return NOTHING if value is None else f"{100 * value:.3g} %"


def flops(value: float | None) -> str:
    """FLOPs with the unit that fits."""
    if value is None:
        return NOTHING
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} M"
