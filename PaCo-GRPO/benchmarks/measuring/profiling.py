"""Which kernels an epoch spends its time in: a table and a trace of one small epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from measuring.epochs import Watched

_ROWS = 30


def profiled(watched: Watched, trace: Path | None = None) -> dict[str, Any]:
    """One epoch of ``watched`` under torch.profiler.

    Args:
        watched: Better a small one (a batch, few steps): every operation is recorded.
        trace: File for a Chrome trace (chrome://tracing, perfetto), ``.json.gz``; None = none.

    Returns:
        The operations that took most of their own time on the accelerator (CPU where there is none), in milliseconds.
    """
    cuda = watched.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        watched.epoch()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    name = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, name), reverse=True)
    total = sum(getattr(event, name) for event in events)
    rows = [
        {"name": event.key, "calls": event.count, "ms": getattr(event, name) / 1000,
         "share": getattr(event, name) / total if total else 0.0}
        for event in events[:_ROWS]
    ]  # fmt: skip
    on = torch.cuda.get_device_name(watched.device) if cuda else "cpu"
    return {"on": on, "total_ms": total / 1000, "operations": rows}
